"""Deduplication as Spark relations: candidates from equal keys, verified pairs, clusters, and survivors."""
