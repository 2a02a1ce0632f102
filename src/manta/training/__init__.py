"""The parts of the default recipe. Nothing here imports ray: what a rank knows of the others comes from its Session."""
