"""Captures a torch module: its forward pass as a flat graph, and the operator graph of one sample."""
