"""Fast evaluators of a plan without its program: memory, and bounds never above the simulated step, or equal to it."""
