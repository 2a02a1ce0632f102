"""Draw docs/terminal.svg: what `python train.py model=cnn training.epochs=6` shows. Run by hand when the view changes."""

import os
import re
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from rich.console import Console
from rich.progress import Progress

from manta import launch, view
from manta.config import from_hydra, register

ROOT = Path(__file__).resolve().parents[1]
OVERRIDES = ["model=cnn", "training.epochs=6"]


def main() -> None:
    recorded: list[Console] = []

    def console(*args: Any, **kwargs: Any) -> Console:
        if recorded:
            return Console(*args, **kwargs)
        recorded.append(Console(record=True, width=118, force_terminal=True, highlight=False, soft_wrap=True))
        return recorded[0]

    # A recording keeps every frame of the live line: leave it out.
    setattr(view, "Console", console)
    setattr(view, "Progress", partial(Progress, disable=True))
    register()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            config = from_hydra(compose("config", [*OVERRIDES, "scaling=in_process"]))
        code = launch.launch(config, OVERRIDES).code
    svg = recorded[0].export_svg(title=f"python train.py {' '.join(OVERRIDES)}")
    # No fonts from the network: the reader's own monospace will do.
    svg = re.sub(r"@font-face\s*{[^}]*}", "", svg).replace("Fira Code", "ui-monospace, Menlo, Consolas")
    svg = re.sub(r"<!--.*?-->\n?", "", svg)
    (ROOT / "docs" / "terminal.svg").write_text(svg)
    sys.exit(code)


if __name__ == "__main__":
    main()
