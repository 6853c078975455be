"""Training: the loop that a newcomer reads first, the stages before it, and everything that hangs on them."""
