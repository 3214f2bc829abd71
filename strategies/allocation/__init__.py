"""Memory as the framework and the driver see it: allocations replayed in an allocator, and what a device holds besides."""
