"""Stages and the shardings of their operators, chosen together on every mesh."""
