"""Long runs on machines that fail: interruptions, checkpoints, recovery and goodput."""
