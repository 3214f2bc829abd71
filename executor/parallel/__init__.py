"""How ranks share a model and its data: one technique a file."""
