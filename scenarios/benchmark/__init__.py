"""The program's own speed on this machine, in CPU time and memory."""
