"""How good deduplication was: precision and recall by true Jaccard similarity, from samples of every run."""
