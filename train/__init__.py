"""The torch half: sizes a model from a token dataset, reads it in a computable order, trains on it, traces it back."""
