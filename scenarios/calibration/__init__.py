"""Machines fitted to measurements: of this machine, of published timings, and of the steps of whole plans."""
