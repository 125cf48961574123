"""Sums of gradients between replicas over slow links: sent whole, in half precision, as low rank, or sparse."""
