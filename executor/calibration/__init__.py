"""Measures this machine, its host and its devices, for the simulator."""
