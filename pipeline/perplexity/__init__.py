"""The language model in use: one mapped file made of an ARPA file, text cut as it wants it, and the score of a line."""
