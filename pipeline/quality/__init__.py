"""Quality: what is measured on a text (Gopher, C4, FineWeb), one module a work, and the decision taken from it."""
