"""Allocations of a step replayed in the framework's allocator, and what a device holds besides."""
