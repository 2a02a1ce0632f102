"""`rerun`: the command that starts a run again, in a directory of its own."""

import re
import shlex
from pathlib import Path

from manta.catalog.details import code_differs
from manta.catalog.entries import Entry
from manta.catalog.settings import read_overrides, split_override
from manta.errors import MantaError, suggest


def overrides_of(entry: Entry, more: list[str]) -> list[str]:
    """What the run was started and resumed with, then `more`; of what is set twice the latest counts.

    Raises:
        MantaError: it is not known what the run was started with, or `more` is no list of overrides.
    """
    for text in more:
        if "=" not in text and not text.startswith("~"):
            raise MantaError(f"{text} has no value: settings are written name=value, e.g. {text}=3.")
        if split_override(text)[0] == "resume":
            raise MantaError(f"{text}: rerun starts afresh. To continue a run: python train.py {text}")
        _check_name(text, entry)
    if not (entry.path / "overrides.txt").is_file():
        raise MantaError(f"{entry} has no overrides.txt: it is not known what it was started with.")
    first = (entry.path / "overrides.txt").read_text().partition("\n")[0]
    if re.search(r"(^|\s)'?resume=", first):
        raise MantaError(
            f"overrides.txt of {entry} begins with a resume: it is not known what it was started with. Its config.yaml has "
            f"every setting: python scripts/runs.py show {entry}"
        )
    return read_overrides(shlex.join(entry.overrides) + "\n" + shlex.join(more))


def _check_name(text: str, entry: Entry) -> None:
    """Refuse what train.py has nothing of; what its groups have it knows best itself.

    Raises:
        MantaError: there is no such setting or group.
    """
    if text.startswith(("+", "~", "hydra")):
        return
    key = split_override(text)[0]
    known = {*entry.defaults.flat, *entry.config, *entry.defaults.groups}
    if re.split(r"[./@]", key)[0] not in {re.split(r"[./@]", name)[0] for name in known}:
        found = suggest(key, known)
        hint = f" Did you mean {found}?" if found else " `python train.py --cfg job` lists all."
        raise MantaError(f"{text}: there is no setting {key}.{hint}")


def command(root: Path, overrides: list[str]) -> list[str]:
    """For a shell: train.py as seen from here."""
    from manta.runs import short

    return ["python", short(root / "train.py"), *overrides]


def warning(entry: Entry) -> str | None:
    """What may make the new run differ from the old one."""
    return code_differs(entry)
