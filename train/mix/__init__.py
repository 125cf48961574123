"""Suggest a mix of sources from the losses that a run measured."""
