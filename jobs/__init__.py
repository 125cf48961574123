"""The `penstock` command, the spark-submit entry point and the recipes; they contain no logic of their own."""
