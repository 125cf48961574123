"""Parallel training: every method of splitting a model over ranks, none of which changes the mathematics."""
