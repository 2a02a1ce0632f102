"""`python -m manta.report <directory>`: what a search starts at its end; people type scripts/report.py."""

import sys
from pathlib import Path

from manta.errors import FINISHED, exit_code
from manta.report.command import write_page
from manta.runs import RunDir


def _write() -> int:
    write_page(RunDir(Path(sys.argv[1])))
    return FINISHED


if __name__ == "__main__":
    sys.exit(exit_code(_write))
