"""Published training runs, one row of flat fields each, as scenarios: every word is read, every gap is assumed."""
