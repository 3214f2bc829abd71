"""Algorithms of collectives: what each puts on every link, one family a file."""
