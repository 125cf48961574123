"""What-if: other thresholds tried on a finished run, from its stored measurements, before anything is run again."""
