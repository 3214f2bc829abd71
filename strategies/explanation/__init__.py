"""Explanation: why a plan is the best, what holds it up, and what would change it."""
