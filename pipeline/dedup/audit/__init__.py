"""The audit of deduplication: precision and recall by true Jaccard similarity, from samples of every run."""
