"""Takedown: documents out of a run's dataset, tables and indexes, with a certificate that others can check."""
