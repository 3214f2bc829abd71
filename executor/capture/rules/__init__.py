"""Rules that say what each ATen operator does to named dims, one file per family of operators."""
