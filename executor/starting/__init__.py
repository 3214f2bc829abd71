"""The first values of a module's parameters: found without the memory of the module, one parameter at a time."""
