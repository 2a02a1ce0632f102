"""What a search found, from its records: trials.csv, what mattered, the refit's spread, summary.json."""

import csv
import json
import math
import os
import re
import shlex
from collections import Counter
from statistics import mean, stdev
from typing import Any

import yaml

from manta import runs
from manta.config import Config, Objective
from manta.runs import RunDir, finite
from manta.search.domains import split_key
from manta.search.record import STOPPED, Record, ranked, trial_dir
from manta.search.space import Space

STATES = (runs.RUNNING, runs.FINISHED, STOPPED, runs.FAILED)
FEWEST_TRIALS = 6  # below, what mattered is noise
LEAST_EXPLAINED = 0.2  # of the variance of held-out trials; chance alone seldom explains as much


def setting(key: str) -> str:
    """The setting that a searched key sets: `model.dropout` of `model.choice.mlp.dropout`."""
    return split_key(key)[0]


def settings(space: Space) -> list[str]:
    """All that is searched."""
    return list(dict.fromkeys(map(setting, space.domains)))


def values_of(record: Record) -> dict[str, Any]:
    """The values that a trial's best belongs to, or its latest."""
    return record.values if record.best is None else record.best["values"]


def counts(records: list[Record]) -> dict[str, int]:
    """Trials by state."""
    found = Counter(record.state for record in records)
    return {state: found[state] for state in STATES}


def one_line(error: str | None) -> str:
    """What an error says: of a traceback the last line."""
    lines = (error or "").strip().splitlines()
    return " ".join(" ".join(lines[-1:] if lines and lines[0].startswith("Traceback") else lines).split())


def failures(records: list[Record]) -> list[tuple[str, int]]:
    """(message, how many trials), the commonest first; messages that differ only in numbers count as one."""
    groups: dict[str, list[str]] = {}
    for record in records:
        if record.state == runs.FAILED:
            message = one_line(record.error) or "no message"
            groups.setdefault(re.sub(r"\d+([.e+-]+\d+)*", "#", message), []).append(message)
    return [(group[0], len(group)) for group in sorted(groups.values(), key=len, reverse=True)]


def all_failed(records: list[Record]) -> str:
    """Why a search has no result, in words."""
    common = failures(records)
    if not common:
        return f"None of the {len(records)} trials was validated."
    how_many = "All" if common[0][1] == len(records) else f"{common[0][1]} of"
    return f"No trial was validated. {how_many} {len(records)} failed with: {common[0][0]}"


# --- trials.csv --------------------------------------------------------------------------------------------------


def write_csv(search: RunDir, config: Config, space: Space, records: list[Record]) -> None:
    """Replace trials.csv in one step."""
    objective = config.objective.metric
    names = (name for record in records if record.best is not None for name in record.best["metrics"])
    metrics = [name for name in dict.fromkeys(names) if name != objective]
    searched = settings(space)
    aside = search.path / f".trials.csv.{os.getpid()}"
    with open(aside, "w", newline="") as file:
        writer = csv.writer(file)
        columns = ["trial", "status", objective, *metrics, "best_epoch", "epochs", "time_s", "error", "directory"]
        writer.writerow([*columns, *searched])
        for record in records:
            best, values = record.best or {"metrics": {}}, space.active(values_of(record))
            row = [record.number, record.state, record.value, *(best["metrics"].get(name) for name in metrics)]
            row += [best.get("epoch"), record.epochs, round(record.seconds, 2), one_line(record.error)]
            row += [trial_dir(search, record.number).path.relative_to(search.path)]
            writer.writerow([*map(finite, row), *(_cell(values[key]) if key in values else "" for key in searched)])
    aside.replace(search.path / "trials.csv")


def _cell(value: Any) -> Any:
    """Numbers and words as they are, everything else as JSON."""
    return value if isinstance(value, int | float | str) and not isinstance(value, bool) else json.dumps(value)


# --- to repeat a trial -------------------------------------------------------------------------------------------


def repeat_overrides(search: RunDir, space: Space, values: dict[str, Any], *more: str) -> list[str]:
    """What `python train.py` needs to train these values as a plain run: the search's own overrides without the search.

    Of what is set more than once (by a resume) the latest counts; `more` comes last.
    """
    path = search.path / "overrides.txt"
    given = shlex.split(path.read_text() if path.is_file() else "")
    of_search = [text for text in given if re.match(r"search($|[./])", _key(text))]
    no_search = [] if of_search else ["search=none"]  # it came with an experiment
    wanted = [*(text for text in given if text not in of_search), *no_search, *space.overrides(values), *more]
    kept: dict[str, str] = {}
    for text in wanted:
        kept.pop(_key(text), None)  # the latest at its own place: groups before what is set in them
        kept[_key(text)] = text
    return [text for key, text in kept.items() if key not in ("resume", "plan", "traceback")]


def trial_command(search: RunDir, space: Space, values: dict[str, Any], *more: str) -> str:
    """The same as a line of overrides.txt."""
    return shlex.join(repeat_overrides(search, space, values, *more))


def repeat_command(search: RunDir, space: Space, record: Record) -> str | None:
    """None under population based training, where no single configuration repeats what a trial went through."""
    return None if record.exploits else f"python train.py {trial_command(search, space, values_of(record))}"


def _key(override: str) -> str:
    """The setting or group that an override sets."""
    return re.split("[=@]", override.lstrip("+~"), maxsplit=1)[0]


# --- what mattered -----------------------------------------------------------------------------------------------


def importance(space: Space, records: list[Record], objective: Objective) -> dict[str, float]:
    """How much each searched setting mattered, the most first; shares of 1, {} if that cannot be told.

    A random forest learns the rank of a trial from its values; a setting matters as much as its predictions for trials
    it has not seen become worse when the setting's values are shuffled among them.
    """
    known = [record for record in ranked(records, objective.mode) if math.isfinite(record.value or 0.0)]
    try:
        found = _importance(space, known) if len(known) >= FEWEST_TRIALS else {}
    except Exception:  # a view of the results is no reason to lose them
        return {}
    total = sum(found.values())
    shares = {key: value / total for key, value in found.items()} if total > 0 else {}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _importance(space: Space, records: list[Record]) -> dict[str, float]:
    """Mean rise of the squared error on held-out trials, not below 0; {} if they cannot be predicted."""
    import numpy as np
    from scipy.stats import rankdata
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.inspection import permutation_importance
    from sklearn.model_selection import KFold

    rows = [space.active(values_of(record)) for record in records]
    names = settings(space)
    table = np.array([_feature(space, key, [row.get(key) for row in rows]) for key in names]).T
    ranks = rankdata([record.value for record in records]) / len(records)
    rises, error, of_mean = [], 0.0, 0.0
    for learn, held in KFold(5, shuffle=True, random_state=0).split(table):
        forest = RandomForestRegressor(50, random_state=0).fit(table[learn], ranks[learn])
        found = permutation_importance(
            forest, table[held], ranks[held], scoring="neg_mean_squared_error", n_repeats=5, random_state=0
        )
        rises.append(found.importances_mean)
        error += ((forest.predict(table[held]) - ranks[held]) ** 2).sum()
        of_mean += ((ranks[learn].mean() - ranks[held]) ** 2).sum()
    if error > (1 - LEAST_EXPLAINED) * of_mean:
        return {}
    return {key: max(float(rise), 0.0) for key, rise in zip(names, np.mean(rises, axis=0), strict=True)}


def _feature(space: Space, name: str, column: list[Any]) -> list[float]:
    """A setting as numbers: logarithms for a logarithmic domain, positions for options.

    Where a conditional setting does not apply it gets its median, so that it does not stand for the option it belongs to.
    """
    domains = [domain for key, domain in space.domains.items() if setting(key) == name]
    present = [value for value in column if value is not None]
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in present):
        logarithmic = any(domain.is_logarithmic for domain in domains) and min(present, default=0) > 0
        column = [value if value is None else math.log(value) if logarithmic else float(value) for value in column]
    else:
        listed = [option for domain in domains for option in domain.values or []]
        options = list(dict.fromkeys(map(json.dumps, [*listed, *present])))
        column = [value if value is None else float(options.index(json.dumps(value))) for value in column]
    numbers = sorted(value for value in column if value is not None)
    return (
        [numbers[len(numbers) // 2] if value is None else value for value in column] if numbers else [0.0] * len(column)
    )


# --- summary.json ------------------------------------------------------------------------------------------------


def refit_summary(search: RunDir, refits: list[RunDir]) -> dict[str, Any]:
    """Validation (of the best checkpoint) and test of the best values, trained anew with other seeds.

    Returns:
        {"seeds", "runs", "val", "test"}; a metric is {"mean", "std" (of the sample; None for one seed), "values"}.
    """
    found = [run.read("summary.json") for run in refits]
    best = [(each.get("best") or {"metrics": {}})["metrics"] for each in found]
    return {
        "seeds": [yaml.safe_load((run.path / "config.yaml").read_text())["seed"] for run in refits],
        "runs": [os.path.relpath(run.path, search.path) for run in refits],
        "val": _spread([{key: value for key, value in each.items() if key.startswith("val/")} for each in best]),
        "test": _spread([each.get("test") or {} for each in found]),
    }


def _spread(found: list[dict[str, float | None]]) -> dict[str, Any]:
    spread = {}
    for key in dict.fromkeys(key for each in found for key in each):
        values = [each.get(key) for each in found]
        known = [value for value in values if value is not None]
        spread[key] = {
            "mean": mean(known) if known else None,
            "std": stdev(known) if len(known) > 1 else None,
            "values": values,
        }
    return spread


def summary(
    search: RunDir, config: Config, space: Space, records: list[Record], refit: dict[str, Any],
    importances: dict[str, float], state: str,
) -> dict[str, Any]:  # fmt: skip
    """summary.json of a search, see docs/run_directory.md.

    Args:
        refit: of `refit_summary`; {} without one.
    """
    first = next(iter(ranked(records, config.objective.mode)), None)
    best = None if first is None else first.best
    found = {"trial": first.number, "values": space.active(best["values"])} if first and best else {}
    return {
        "state": state,
        "objective": {
            "metric": config.objective.metric,
            "mode": config.objective.mode,
            "value": best["value"] if best else None,
        },
        "metrics": best["metrics"] if best else {},
        "best": best
        and {
            "trial": found["trial"],
            "epoch": best["epoch"],
            "step": best["step"],
            "checkpoint": "best/checkpoint",
            "metrics": best["metrics"],
            "values": found["values"],
        },
        "test": {key: spread["mean"] for key, spread in refit.get("test", {}).items()},
        "refit": refit,
        "trials": counts(records),
        "failures": [{"message": message, "trials": count} for message, count in failures(records)],
        "epochs": sum(record.epochs for record in records),
        "importance": importances,
        "resume_command": f"python train.py resume={shlex.quote(str(search))}",
        "repeat_command": repeat_command(search, space, first) if first else None,
    }
