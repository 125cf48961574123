"""The model over the ranks: every way of splitting it, none of which is in the mathematics."""
