"""The sections of a recipe that the training half reads."""
