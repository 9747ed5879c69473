"""The data plane: weights, KV cache, one step at a time."""
