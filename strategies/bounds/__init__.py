"""What a plan takes, without its program: bounds never above the simulated step, or equal to it."""
