"""Scaling laws, published and fitted, and the worth of repeated tokens; without torch."""
