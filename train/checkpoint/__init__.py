"""Checkpoints: sharded weights and optimizer state, complete or absent, readable at any number of ranks and layout."""
