"""Train: `python train.py --help`. Composes the configuration, checks it and launches a run or a search.

Nothing heavy is imported here, so help, tab completion and configuration errors are quick.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from manta.errors import FINISHED, INTERRUPTED, JobError, MantaError, exit_code

if TYPE_CHECKING:
    from manta.launch import Outcome

HERE = Path(__file__).resolve().parent
CODES: list[int] = []  # one a job
TRACEBACKS = False  # HYDRA_FULL_ERROR=1 or traceback=true


@hydra.main(version_base="1.3", config_path=str(HERE / "conf"), config_name="config")
def job(cfg: DictConfig) -> float | None:
    """One run, or a multirun that is resumed; with a launcher of Hydra's that is not ours also one job of a multirun.

    Returns the best value of the objective, for sweepers that optimise.
    """
    settings = HydraConfig.get()
    overrides = list(OmegaConf.to_container(settings.overrides.task, resolve=False))  # type: ignore[arg-type]
    if settings.mode == RunMode.MULTIRUN and cfg.group is None:
        cfg.group = "_".join(Path(settings.sweep.dir).parts[-2:])
    outcomes: list[Outcome] = []

    def go() -> int:
        from manta.request import run

        outcomes.append(run(cfg, overrides))
        return outcomes[0].code

    code = exit_code(go, TRACEBACKS or cfg.traceback)
    CODES.append(code)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code != FINISHED and settings.mode == RunMode.MULTIRUN:
        raise JobError(code)
    return outcomes[0].objective if outcomes else None


def main() -> int:
    """Everything around Hydra: `.env` before it, its errors in our words after it."""
    from hydra_plugins.manta_multirun import register as register_launchers
    from manta import multirun
    from manta.commandline import check_arguments, explain, with_domains
    from manta.config import register
    from manta.env import load_env_file

    load_env_file(HERE / ".env")
    sys.argv[1:] = with_domains(sys.argv[1:])
    check_arguments(sys.argv[1:])
    register()
    register_launchers()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors instead of printing them
    code = FINISHED
    try:
        job()
    except JobError as failed:
        code = failed.code
    except MantaError:
        raise
    except Exception as error:
        raise explain(error, sys.argv[1:], HERE / "conf") from error
    finally:
        ended = multirun.end()
    return code or ended or max(CODES, default=FINISHED)


if __name__ == "__main__":
    TRACEBACKS = os.environ.get("HYDRA_FULL_ERROR") == "1" or "traceback=true" in map(str.lower, sys.argv)
    sys.exit(exit_code(main, TRACEBACKS))
