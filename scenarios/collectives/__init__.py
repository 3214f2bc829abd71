"""Measured collectives of any machine: read, predicted and judged."""
