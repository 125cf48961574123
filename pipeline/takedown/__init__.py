"""Takedown: removal of documents from a run's dataset, tables and indexes, with a certificate that others can check."""
