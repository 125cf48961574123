"""The model: its shape, layers, attention and loss, as one rank computes them."""
