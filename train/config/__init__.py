"""The sections of a recipe that training reads."""
