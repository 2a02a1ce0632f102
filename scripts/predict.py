"""Predict with a checkpoint of a run: `python scripts/predict.py --help`."""

import sys
from pathlib import Path

from manta.arguments import main
from manta.predict import Arguments, predict

ROOT = Path(__file__).resolve().parents[1]

if __name__ == "__main__":
    sys.exit(main(Arguments, lambda arguments: predict(arguments, ROOT / "conf"), sys.argv, ROOT))
