"""Reads and checks input files, reports their faults, and writes results."""
