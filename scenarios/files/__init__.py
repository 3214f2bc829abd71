"""How input files are read, what is wrong with them is said, and results are written."""
