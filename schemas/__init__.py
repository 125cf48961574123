"""The contract between the two halves: errors, tables, manifests, configuration and storage."""
