"""Things broken on purpose, at random moments and with random input. `make drills` runs what takes minutes."""
