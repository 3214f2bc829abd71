"""A discrete-event model of accelerators, host memory and interconnect.

The simulator knows clusters, operator graphs and programs; it does not know plans.
"""
