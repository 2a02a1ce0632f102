"""Early checks."""


def check(config): ...
