"""Simulator of one training step on accelerators, host memory and an interconnect.

It knows clusters, operator graphs and programs; it does not know plans.
"""
