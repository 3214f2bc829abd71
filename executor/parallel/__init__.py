"""Techniques that divide a model and its data among ranks, one in each file."""
