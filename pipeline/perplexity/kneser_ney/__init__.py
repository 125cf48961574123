"""N-gram language models: a trainer on Spark, a compiled file that workers share, and its scorer."""
