"""What the fields of input files are called, and what each may hold."""
