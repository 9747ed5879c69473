"""How the ranks of a worker are run: in its own process, as processes of this host, by Ray, under torchrun."""
