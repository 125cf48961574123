"""Read-only views of finished runs: single documents, the difference of two runs, and what-if predictions."""
