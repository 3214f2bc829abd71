"""A plan in the words of other systems: one function each, all of them in `meshwise.executor.export.launchers`."""
