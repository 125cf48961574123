"""From the losses of a run's sources to a mix of them: what was measured, what it says, and how far to follow it."""
