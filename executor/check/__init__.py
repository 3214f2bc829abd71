"""What a run is held against: one process, and what torch itself counts of memory and messages."""
