"""What files for other machines have in common: where they are written, how many machines they ask for, and no secrets."""

import dataclasses
import math
import os
import re
from pathlib import Path
from typing import Any

import yaml

from manta import plan
from manta.cluster.elsewhere import PROJECT, Request, name_of
from manta.cluster.rules import alone
from manta.config import Config
from manta.errors import MantaError
from manta.plan import Needs, Node

CLUSTERS = PROJECT / "outputs" / "clusters"
"""A folder here for each cluster."""
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL", re.IGNORECASE)  # names of environment variables
SHORTEST_SECRET = 8  # characters: `true` and `online` are in every file


@dataclasses.dataclass(frozen=True)
class Machines:
    """Those beside the head."""

    least: int
    most: int
    needs: Needs
    """What will run there."""


def machines(config: Config, head: Node, node: Node, least: int | None, most: int | None, ways_out: str) -> Machines:
    """How many machines like `node` the workers need.

    Args:
        head: what training may use of it, where everything runs there.
        least: so many, whatever they need.
        most: so many when the autoscaler has added some.
        ways_out: settings that give more.

    Raises:
        MantaError: they would not hold the workers, which the launch there would refuse.
    """
    scaling = config.scaling
    resolve = plan.resolve_trial if config.search.algorithm else plan.resolve
    try:
        if alone(config):
            return Machines(0, 0, resolve(config, [head], False))
        one = dataclasses.replace(config, scaling=dataclasses.replace(scaling, num_workers=1, max_workers=None))
        fit = plan.room(resolve(one, [node], False).per_worker, [node])
        if scaling.placement_strategy == "STRICT_SPREAD":
            fit = 1
        workers = scaling.num_workers if isinstance(scaling.num_workers, int) else 1
        least = math.ceil(workers / fit) if least is None else least
        needs = resolve(config, [node] * least, False)
    except MantaError as error:
        raise MantaError(f"{error}\nOr have more: {ways_out}.") from error
    grown = math.ceil(needs.most_workers / fit)
    return Machines(least, max(least, grown) if most is None else most, needs)


def arguments(request: Request, min_nodes: int) -> list[str]:
    """Of train.py there: it joins the Ray beside it, when that has all its nodes."""
    config = request.config
    there = ["cluster=existing", "cluster.address=auto"]
    there += [f"cluster.min_nodes={min_nodes}", f"cluster.wait_s={config.cluster.wait_s:g}"]
    there.append(f"storage.path={config.storage.path}")
    if not config.resume:  # it has its own
        there.append(f"data.root={config.data.root}")
    return request.arguments(*there, overrides=[each for each in request.overrides if name_of(each) != "plan"])


def given(fields: dict[str, Any]) -> dict[str, Any]:
    """Without what is empty."""
    return {key: value for key, value in fields.items() if value}


def as_yaml(content: dict[str, Any]) -> str:
    return yaml.safe_dump(content, sort_keys=False, width=1000)


def refuse_secrets(request: Request, *texts: str) -> None:
    """Before texts are written or shown.

    Raises:
        MantaError: the value of a secret is in one.
    """
    for name in secrets_in("\n".join([*request.overrides, *texts])):
        raise MantaError(
            f"The files for cluster={request.config.cluster.kind} would have the value of {name} in them, and secrets are not "
            "written to files. Leave it out of the settings; docs/kubernetes.md and docs/cloud.md say how it gets there."
        )


def write(files: dict[Path, str]) -> None:
    """Write files.

    Raises:
        MantaError: a folder cannot be written.
    """
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    except OSError as error:
        raise MantaError(f"{error.filename} cannot be written: {error.strerror}. Mend its permissions.") from error


def secrets_in(text: str) -> list[str]:
    """Environment variables (those of .env are among them) that are named like secrets, and whose value is in a text."""
    values = {name: value for name, value in os.environ.items() if SECRET.search(name)}
    return [
        name
        for name, value in values.items()
        if len(value) >= SHORTEST_SECRET
        and value in text
        and not os.path.exists(value)  # the place of one is no secret
    ]
