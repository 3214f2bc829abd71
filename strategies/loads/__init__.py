"""Loads that vary from step to step: lengths of samples, loads of experts, speeds of devices; and plans under them."""
