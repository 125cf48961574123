"""The model: shape, layers, attention, loss; it knows of no other rank."""
