"""The runs at hand: scripts/runs.py lists, shows, compares, repeats and deletes run directories. Imports nothing heavy."""
