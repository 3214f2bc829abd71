"""Explanation of a plan: why it is the best, what takes its time, and what would change the choice."""
