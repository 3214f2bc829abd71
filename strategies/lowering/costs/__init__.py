"""Costs of what one rank computes, sends and keeps: of operators, of blocks and of stages."""
