"""The Spark half: stages that turn archives into a token dataset, each a module of pure functions."""
