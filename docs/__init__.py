"""Writes the pages that are made from code."""
