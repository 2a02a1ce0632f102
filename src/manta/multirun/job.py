"""The process of a job that runs beside others: `python -m manta.multirun.job <its folder> <train.py> [traceback]`."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from manta.errors import INTERRUPTED, exit_code

LOOK_S = 0.5
END_S = 30.0
"""How long it may take to stop once its multirun is gone."""


def end_with(parent: int) -> None:
    """Stop after a checkpoint when the command is gone that started this process, however it was ended."""
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_S)
    os._exit(INTERRUPTED)


def main(folder: str, script: str) -> int:
    from manta.config import register
    from manta.multirun.jobs import Job

    register()
    sys.path[0] = str(Path(script).parent)  # as if the script ran: the project's own code is found, also by workers
    job = Job(Path(folder))
    prepared = job.thaw()
    sys.argv = [script, *prepared.overrides]
    return job.launch(prepared)


if __name__ == "__main__":
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    folder, script, *options = sys.argv[1:]
    sys.exit(exit_code(lambda: main(folder, script), tracebacks=bool(options)))
