"""The page of a search at its end, made in a process of its own: whatever happens there, the search does not notice.

Imports nothing heavy.
"""

import shlex
import subprocess
import sys

from manta.runs import RunDir
from manta.view import View

MOST_S = 120.0


def report_after(run: RunDir, view: View, most_s: float = MOST_S) -> None:
    """Write report.html; if that fails or takes too long, say so in one line, and why in train.log."""
    command = [sys.executable, "-m", "manta.report", str(run.path)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=most_s, check=False,
            start_new_session=True,  # Ctrl-C is for the search
        )  # fmt: skip
        said, failed = done.stderr.strip(), done.returncode != 0
        why = (said.splitlines() or [f"exit code {done.returncode}"])[-1].removeprefix("Error: ")
    except subprocess.TimeoutExpired:
        said, failed, why = "", True, f"it took longer than {most_s:g} s"
    except Exception as error:
        said, failed, why = repr(error), True, str(error)
    if failed:
        (run.path / "report.html").unlink(missing_ok=True)  # of an earlier launch: it would tell less than there is
        view.say(f"The report could not be made: {why}; python scripts/report.py run={shlex.quote(str(run))}")
        view.note(said)
