"""The commands, a module for each group; heavy imports wait until a command runs."""
