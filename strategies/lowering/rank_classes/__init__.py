"""Which ranks do the same at the same time, and which of them talk to each other over what links."""
