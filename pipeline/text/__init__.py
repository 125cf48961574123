"""Text by language: splitting into words, with or without spaces, spans, and profiles of clean text."""
