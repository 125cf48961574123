"""URL rules as signals: lists of domains and URLs, and words in URLs."""
