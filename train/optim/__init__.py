"""The optimisers, their schedules, and what keeps a step finite."""
