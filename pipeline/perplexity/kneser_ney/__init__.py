"""Training of n-gram language models on Spark, with interpolated modified Kneser-Ney smoothing; writes ARPA files."""
