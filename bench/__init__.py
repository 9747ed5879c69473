"""Benchmarks of single parts: memory of the KV pool, speed of the scheduler core and of the whole control plane."""
