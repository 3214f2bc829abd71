"""Fits the kernel models of an accelerator to published measurements, and says how well they hold."""
