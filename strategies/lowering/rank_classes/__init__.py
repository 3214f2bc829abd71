"""Rank classes: which ranks do the same work at the same time, and which of them communicate over which links."""
