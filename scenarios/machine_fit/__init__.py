"""A machine fitted to a few measured steps of any plans."""
