"""A module that stays whole on every rank, trained under a plan by torch's data parallelism and sharded states."""
