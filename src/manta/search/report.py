"""What a search says in words: the plan before it, the final table and search.md after it. Imports nothing heavy."""

import math
import re
import shlex
from typing import Any

from manta.config import Config
from manta.runs import FAILED, FINISHED, RunDir
from manta.search.record import STOPPED, Record, ranked
from manta.search.results import counts, one_line, settings, values_of
from manta.search.space import Space
from manta.view import Rows, assignments, brief, number

ASHA = ("asha", "async_hyperband", "asynchyperband")


# --- before ------------------------------------------------------------------------------------------------------


def plan_rows(config: Config, space: Space, trials: int | None, needs_each: str, at_once: int) -> Rows:
    """What is searched, how, and what it costs at most.

    Args:
        trials: how many; None = until the time is over.
        needs_each: resources of one trial, in words.
    """
    search, epochs = config.search, config.training.epochs
    rows: Rows = [(key, written(space, config, key)) for key in space.domains]
    rows.append(("algorithm", _call(search.algorithm)))
    rows.append(("scheduler", _call(search.scheduler) if search.scheduler else "none: every trial trains to its end"))
    budget = "" if search.time_budget_s is None else f", {search.time_budget_s:g} s at most"
    waves = "" if trials is None else f" ({math.ceil(trials / at_once)} waves)"
    rows.append(("trials", f"{'as many as the time allows' if trials is None else trials}{budget}"))
    rows.append(("each", needs_each))
    rows.append(("at once", f"{at_once}{waves}"))
    if trials is not None and epochs is not None:
        expected = _halving(config, trials, epochs)
        about = "" if expected is None else f"; about {expected:,.0f} with successive halving"
        rows.append(("epochs", f"{trials} x {epochs} = {trials * epochs:,} at most{about}"))
    if search.refit:
        rows.append(("refit", f"the best, with {search.refit_seeds} other seeds, each evaluated once on test"))
    return rows


def written(space: Space, config: Config, key: str) -> str:
    """A domain as it is written in `search.space`."""
    found: Any = config.search.space
    for part in key.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    domain = space.domains[key]
    return found if isinstance(found, str) else f"{domain.name}({', '.join(map(str, domain.arguments))})"


def _call(settings: dict[str, Any]) -> str:
    """E.g. `asha (grace_period 1, reduction_factor 3)`."""
    given = ", ".join(f"{key} {value}" for key, value in settings.items() if key != "name" and value is not None)
    return str(settings.get("name", "none")) + (f" ({given})" if given else "")


def _halving(config: Config, trials: int, epochs: int) -> float | None:
    """Epochs that ASHA is expected to train in all; None for another scheduler.

    All trials reach the first rung at g = grace_period epochs, and a share of 1/r (reduction_factor) of those that reach
    a rung goes on to the next, at r times the epochs, until max_t. ASHA decides before all have come, and lets some go on
    that a later comparison would have stopped: it trains somewhat more.
    """
    scheduler = config.search.scheduler
    if str(scheduler.get("name")).lower() not in ASHA:
        return None
    grace, factor = float(scheduler.get("grace_period") or 1), float(scheduler.get("reduction_factor") or 4)
    most = min(float(scheduler.get("max_t") or epochs), epochs)
    reached, share, total = 0.0, 1.0, 0.0
    while reached < most and factor > 1:
        rung = min(grace if reached == 0 else reached * factor, most)
        total += share * (rung - reached)
        reached, share = rung, share / factor
    return trials * total


# --- after -------------------------------------------------------------------------------------------------------


def repeat_overrides(search: RunDir, space: Space, values: dict[str, Any]) -> list[str]:
    """What `python train.py` needs to train these values as a plain run: the search's own overrides without the search.

    Of what a resume set, the latest counts.
    """
    path = search.path / "overrides.txt"
    given = shlex.split(path.read_text() if path.is_file() else "")
    chosen = space.overrides(values)
    dropped = {"resume", "plan", "traceback", *map(_key, chosen)}
    of_search = [text for text in given if re.match(r"search($|[./])", _key(text))]
    kept = {_key(text): text for text in given if text not in of_search and _key(text) not in dropped}
    no_search = [] if of_search else ["search=none"]  # it came with an experiment
    return [*kept.values(), *no_search, *chosen]


def _key(override: str) -> str:
    """The setting or group that an override sets."""
    return re.split("[=@]", override.lstrip("+~"), maxsplit=1)[0]


def repeat_command(search: RunDir, space: Space, values: dict[str, Any]) -> str:
    return f"python train.py {shlex.join(repeat_overrides(search, space, values))}"


def failures(records: list[Record]) -> list[tuple[str, int]]:
    """(message, how many trials), the commonest first; messages that differ only in numbers count as one."""
    groups: dict[str, list[str]] = {}
    for record in records:
        if record.state == FAILED:
            message = one_line(record.error) or "no message"
            groups.setdefault(re.sub(r"\d+([.e+-]+\d+)*", "#", message), []).append(message)
    return [(group[0], len(group)) for group in sorted(groups.values(), key=len, reverse=True)]


def result_rows(
    search: RunDir, config: Config, space: Space, records: list[Record], refit: dict[str, Any], state: str
) -> Rows:
    """The final table: what was found, what it took, where it is, and what to do next."""
    settings, where, command = config.search, shlex.quote(str(search)), "python train.py"
    first = next(iter(ranked(records, config.objective.mode)), None)
    rows: Rows = []
    if first is not None and first.best is not None:
        found = f"{config.objective.metric} {number(first.value)} in epoch {first.best['epoch']}"
        rows.append(("best", f"trial {first.number}: {found}"))
        rows.append(("values", assignments(space.active(first.best["values"]))))
    rows += [(split, _spread_text(refit[split])) for split in ("val", "test") if refit.get(split)]
    rows.append(("trials", _counted(records)))
    trained = sum(record.epochs for record in records)
    number_of_trials = max(settings.num_samples or 0, len(records))
    most = "" if config.training.epochs is None else f" of at most {number_of_trials * config.training.epochs:,}"
    rows.append(("epochs", f"{trained:,} trained{most}"))
    rows += [("all trials", f"{search}/trials.csv"), ("report", f"{search}/search.md")]
    if first is not None:
        rows += [("best run", f"{search}/best"), ("evaluate", f"python scripts/evaluate.py run={where}")]
    if state != FINISHED:
        rows.append(("resume", f"{command} resume={where}"))
    elif settings.num_samples is not None and settings.algorithm.get("name") != "grid":
        rows.append(("extend", f"{command} resume={where} search.num_samples={2 * settings.num_samples}"))
    if first is not None:
        rows.append(("repeat best", repeat_command(search, space, values_of(first))))
    return rows


def _counted(records: list[Record]) -> str:
    """E.g. `6 finished, 3 stopped early, 1 failed: <why>`."""
    found = counts(records)
    words = {STOPPED: "stopped early"}
    text = ", ".join(f"{count} {words.get(state, state)}" for state, count in found.items() if count) or "none"
    common = failures(records)[:1]
    of = f" ({common[0][1]} of them)" if common and common[0][1] < found[FAILED] else ""
    return text + "".join(f": {message}{of}" for message, _ in common)


def _spread_text(metrics: dict[str, Any]) -> str:
    """Mean ± standard deviation over the seeds of a refit."""
    return "  ".join(f"{key} {_plus_minus(spread)}" for key, spread in metrics.items())


def _plus_minus(spread: dict[str, Any]) -> str:
    return number(spread["mean"]) + ("" if spread["std"] is None else f" ± {number(spread['std'])}")


def write_report(
    search: RunDir, config: Config, space: Space, records: list[Record], refit: dict[str, Any],
    importances: dict[str, float], state: str,
) -> None:  # fmt: skip
    """Replace search.md in one step."""
    objective, best = config.objective, ranked(records, config.objective.mode)[:10]
    trained = sum(record.epochs for record in records)
    aim = "highest" if objective.mode == "max" else "lowest"
    parts = [f"# Search {search.path.name}", f"{state.capitalize()}: {_counted(records)}; {trained:,} epochs trained. "
             f"Looked for: the {aim} {objective.metric}."]  # fmt: skip
    domains = [[f"`{key}`", f"`{written(space, config, key)}`"] for key in space.domains]
    method = [f"algorithm: {_call(config.search.algorithm)}", f"scheduler: {_call(config.search.scheduler)}"]
    parts += ["## Searched", _markdown(["setting", "domain"], domains), "; ".join(method)]
    parts.append("## Best trials")
    if best:
        keys = settings(space)
        rows = [_trial_row(rank, record, space, keys) for rank, record in enumerate(best, start=1)]
        parts.append(_markdown(["rank", "trial", objective.metric, "epochs", *keys], rows))
    else:
        parts.append("None was validated.")
    if importances:
        shares = [[f"`{key}`", f"{share:.0%}"] for key, share in importances.items()]
        parts += ["## What mattered", _markdown(["setting", "share"], shares)]
    if common := failures(records):
        rows = [[str(count), message] for message, count in common]
        parts += ["## Failures", _markdown(["trials", "message"], rows)]
    if refit.get("runs"):
        rows = [[key, _plus_minus(each), *map(number, each["values"])] for split in ("val", "test")
                for key, each in refit.get(split, {}).items()]  # fmt: skip
        head = ["metric", "mean ± std", *(f"seed {seed}" for seed in refit["seeds"])]
        parts += ["## The best, trained anew", _markdown(head, rows)]
    if best:
        parts += ["## Repeat the best", f"```bash\n{repeat_command(search, space, values_of(best[0]))}\n```"]
    aside = search.path / ".search.md"
    aside.write_text("\n\n".join(parts) + "\n")
    aside.replace(search.path / "search.md")


def _trial_row(rank: int, record: Record, space: Space, keys: list[str]) -> list[str]:
    values = space.active(values_of(record))
    shown = [brief(values[key]) if key in values else "" for key in keys]
    return [str(rank), str(record.number), number(record.value), str(record.epochs), *shown]


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
