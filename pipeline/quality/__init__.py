"""Quality signals of a text (Gopher, C4, FineWeb and others, one module per publication) and the rules on them."""
