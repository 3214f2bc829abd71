"""What one rank computes, sends and keeps: operator by operator, block by block, stage by stage."""
