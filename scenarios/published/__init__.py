"""Scenarios from published training runs, one row of flat fields per run; missing fields become noted assumptions."""
