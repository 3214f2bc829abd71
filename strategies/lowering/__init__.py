"""Lowering: turn a problem and a plan into the program that the simulator runs."""
