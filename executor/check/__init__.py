"""References for a run: training by one process, and what torch itself counts of memory and messages."""
