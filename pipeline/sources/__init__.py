"""Sources: how files of the outside world become rows, with an account of every byte."""
