"""Processes beside the one that trains: they tell trackers and fill buckets. Imports nothing heavy."""

import os
import signal


def stand_back() -> None:
    """Whoever trains goes first, hears the signals, and says how it ended."""
    os.nice(5)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
