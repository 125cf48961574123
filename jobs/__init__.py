"""The spark-submit shells, the `penstock` command and the recipes; no logic of their own."""
