"""The public API, version 1."""
