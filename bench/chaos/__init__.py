"""Kills, suspends and stops the processes of a cluster at random while clients read from it (`make chaos`)."""
