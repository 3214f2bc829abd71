"""The training of one rank: data, optimizer, steps and checkpoints."""
