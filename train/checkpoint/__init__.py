"""Checkpoints: sharded weights and optimiser state, complete or absent, readable at any number of ranks and layout."""
