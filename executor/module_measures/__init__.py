"""What a user's module takes on this machine, measured for a few seconds on all ranks, and its first batch."""
