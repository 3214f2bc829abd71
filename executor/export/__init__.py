"""Exports a plan to other launchers; `meshwise.executor.export.launchers` has a function for each."""
