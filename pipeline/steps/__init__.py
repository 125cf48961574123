"""The passes over the documents: read and measured, scored, judged, redacted; part by part, each in one worker."""
