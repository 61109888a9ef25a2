"""Models built on the public operations."""
