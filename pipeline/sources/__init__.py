"""Sources: readers that turn input files into rows and account for every byte."""
