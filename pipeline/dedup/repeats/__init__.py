"""Repeated passages: lines, paragraphs, spans of sentences and runs of tokens that occur elsewhere are cut.

Pass 1 tallies the 64-bit key of every unit of every document, part by part. The totals of keys that occur often enough
return to their parts. Pass 2 reads the text again, cuts the repeats, and computes verdicts for the remaining text.
"""
