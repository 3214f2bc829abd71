"""Runs a plan for real on torch.distributed and measures it."""
