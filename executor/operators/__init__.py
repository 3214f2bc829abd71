"""The operator back end: a captured program with every operator cut as a plan says."""
