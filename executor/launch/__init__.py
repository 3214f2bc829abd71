"""Starts the ranks of a run, watches them, and reads what they leave."""
