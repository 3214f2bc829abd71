"""Figures of the model fitted to published measurements of kernels and collectives, and how well they hold."""
