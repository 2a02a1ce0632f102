"""A run, a search or several runs as a page with pictures: `python scripts/report.py --help`."""

import sys
from pathlib import Path

from manta.arguments import main
from manta.report.command import Arguments, report

ROOT = Path(__file__).resolve().parents[1]

if __name__ == "__main__":
    sys.exit(main(Arguments, report, sys.argv, ROOT))
