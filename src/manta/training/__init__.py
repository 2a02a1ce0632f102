"""The parts of the default recipe: what a training loop is made of."""
