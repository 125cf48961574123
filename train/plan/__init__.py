"""The plan: what the dataset says about model and run, what it costs, and what fits on which ranks."""
