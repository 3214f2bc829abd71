"""What is decided: the layout that a user writes, the complete plan that it means, and the rules that it must keep."""
