"""Random states and keep masks."""
