"""What is known of languages: how text falls into words, with spaces or without, and what clean text is like."""
