"""The public protos, by their package path."""
