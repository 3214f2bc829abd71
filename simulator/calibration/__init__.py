"""Fits of the machine model to published measurements of kernels and collectives, and the errors of these fits."""
