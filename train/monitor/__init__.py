"""The monitoring of a run: metrics, events, the progress line, the profiler, the guard and the quarantine list."""
