"""Penstock from Python: the public functions over both halves."""
