"""Scenarios: YAML files become values, and the command line runs them; `meshwise.load` is the way in."""
