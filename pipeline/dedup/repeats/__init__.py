"""Repeated passages: lines, paragraphs, spans of sentences and runs of tokens that also occur elsewhere are cut.

The first pass counts the 64-bit keys of all units (such as lines) of all documents, part by part. The keys that occur
often enough return to the parts that contain them. The second pass reads the text again, cuts the repeats, and computes
verdicts for the remaining text.
"""
