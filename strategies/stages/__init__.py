"""How layers and recomputation are divided among pipeline stages: the mathematical cores, on arrays of numbers."""
