"""The runs at hand: `python scripts/runs.py --help`. Lists, shows, compares, repeats and deletes them."""

import sys
from pathlib import Path

from manta.catalog.commands import main

ROOT = Path(__file__).resolve().parents[1]

if __name__ == "__main__":
    sys.exit(main(sys.argv, ROOT))
