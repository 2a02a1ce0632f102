"""Evaluate a checkpoint of a run: `python scripts/evaluate.py --help`."""

import sys
from pathlib import Path

from manta.arguments import main
from manta.evaluate import Arguments, evaluate

ROOT = Path(__file__).resolve().parents[1]

if __name__ == "__main__":
    sys.exit(main(Arguments, evaluate, sys.argv, ROOT))
