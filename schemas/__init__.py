"""The contract between pipeline and trainer: errors, tables, manifests, configuration and storage."""
