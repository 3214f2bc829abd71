"""Figures of the model fitted to published measurements."""
