"""The operator back end: runs a captured program with every operator cut as a plan says."""
