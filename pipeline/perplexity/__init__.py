"""Perplexity of documents: n-gram training, compilation of ARPA files to model files, and scoring."""
