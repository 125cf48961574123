"""Deduplication as Spark relations: candidates from equal keys, verified pairs, clusters, and the copy that stays."""
