"""What is seen of a run: measurements, events, the progress line, and judgements on them."""
