"""Iteration-level batching over a paged KV cache: sequences, blocks as integers, time. No torch, no text."""
