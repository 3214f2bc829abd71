"""Studies of the program itself on many problems and runs, and generators of its documentation."""
