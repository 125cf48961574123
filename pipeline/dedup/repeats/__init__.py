"""Passages that stand elsewhere: lines, paragraphs, spans of sentences and runs of text, found in all parts and cut.

Pass 1 tallies the 64-bit key of every unit of every document, part by part; the totals of the keys that occur often
enough go back to their parts, and pass 2 reads the text again, cuts, and has what is left judged again.
"""
