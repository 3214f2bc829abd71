"""Plans of a user's own module: what it has shown in a few seconds becomes a problem of the simulator, and a choice."""
