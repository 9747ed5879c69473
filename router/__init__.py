"""The public gRPC API: checks, tokenizes, chooses a scheduler, relays, detokenizes."""
