"""What a search says in words: the plan before it, the final table and search.md after it. Imports nothing heavy."""

import math
import shlex
from typing import Any

from manta.config import Config
from manta.runs import FAILED, FINISHED, RUNNING, RunDir
from manta.search.record import STOPPED, Record, ranked
from manta.search.results import settings, values_of
from manta.search.settings import Asha
from manta.search.space import Space
from manta.view import Rows, assignments, brief, number

# --- before ------------------------------------------------------------------------------------------------------


def plan_rows(config: Config, space: Space, needs_each: str, at_once: int) -> Rows:
    """What is searched, how, and what it costs at most.

    Args:
        needs_each: resources of one trial, in words.
    """
    search, epochs, trials = config.search, config.training.epochs, number_of_trials(config, space)
    rows: Rows = [(key, str(domain)) for key, domain in space.domains.items()]
    rows.append(("algorithm", _call(search.algorithm)))
    rows.append(("scheduler", _call(search.scheduler) if search.scheduler else "none: every trial trains to its end"))
    budget = "" if search.time_budget_s is None else f", {search.time_budget_s:g} s at most"
    waves = "" if trials is None or trials <= at_once else f" ({math.ceil(trials / at_once)} waves)"
    rows.append(("trials", f"{'as many as the time allows' if trials is None else trials}{budget}"))
    rows += [("each", needs_each), ("at once", f"{at_once}{waves}")]
    if trials is not None and epochs is not None:
        expected = _halving(config, trials, epochs)
        about = "" if expected is None else f"; about {expected:,.0f} with successive halving"
        rows.append(("epochs", f"{trials} x {epochs} = {trials * epochs:,} at most{about}"))
    if search.refit:
        rows.append(("refit", f"the best again with {search.refit_seeds} fresh seeds, each evaluated once on test"))
    return rows


def number_of_trials(config: Config, space: Space) -> int | None:
    """How many trials a search has in the end; None = as many as the time allows."""
    return len(space.grid()) if config.search.algorithm.get("name") == "grid" else config.search.num_samples


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
    given = dict(config.search.scheduler)
    if given.pop("name", None) != "asha":
        return None
    asha = Asha(**given)
    grace, factor, most = float(asha.grace_period), float(asha.reduction_factor), min(asha.max_t or epochs, epochs)
    reached, share, total = 0.0, 1.0, 0.0
    while reached < most:
        rung = min(grace if reached == 0 else reached * factor, most)
        total += share * (rung - reached)
        reached, share = rung, share / factor
    return trials * total


# --- after -------------------------------------------------------------------------------------------------------


def result_rows(
    search: RunDir, config: Config, space: Space, summary: dict[str, Any], state: str, seconds: float
) -> Rows:
    """What was found (by summary.json), what it took, where it is, and what to do next."""
    where, best, command = shlex.quote(str(search)), summary.get("best"), "python train.py"
    rows: Rows = []
    if best:
        metric, value = config.objective.metric, summary["objective"]["value"]
        rows.append(("best", f"trial {best['trial']}, epoch {best['epoch']}: {metric} {number(value)}"))
        rows.append(("values", assignments(best["values"])))
    refit = summary.get("refit") or {}
    rows += [(f"refit {split}", _spread_text(refit[split])) for split in ("val", "test") if refit.get(split)]
    if summary.get("test") and not refit.get("test"):
        rows.append(("test", "  ".join(f"{key} {number(value)}" for key, value in summary["test"].items())))
    if summary:
        rows.append(("trials", _counted(summary)))
        trials = max(number_of_trials(config, space) or 0, sum(summary["trials"].values()))
        most = "" if config.training.epochs is None else f" of at most {trials * config.training.epochs:,}"
        rows.append(("epochs", f"{summary['epochs']:,} trained{most}"))
    rows.append(("time", f"{seconds:.1f} s"))
    if (search.path / "trials.csv").is_file():
        rows.append(("all trials", f"{search}/trials.csv"))
    if (search.path / "search.md").is_file():
        rows.append(("in words", f"{search}/search.md"))
    if (search.path / "report.html").is_file():
        rows.append(("report", f"{search}/report.html"))
    if best:
        rows += [("best run", f"{search}/best"), ("evaluate", f"python scripts/evaluate.py run={where}")]
    samples = config.search.num_samples
    if state != FINISHED or summary["trials"].get("running"):
        rows.append(("resume", f"{command} resume={where}"))
    elif samples is not None and config.search.algorithm.get("name") != "grid":
        rows.append(("extend", f"{command} resume={where} search.num_samples={2 * samples}"))
    if summary.get("repeat_command"):
        rows.append(("repeat best", summary["repeat_command"]))
    return rows


def _counted(summary: dict[str, Any]) -> str:
    """E.g. `6 finished, 3 stopped early, 1 failed: <why>`."""
    found, words = summary["trials"], {STOPPED: "stopped early", RUNNING: "not ended"}
    text = ", ".join(f"{count} {words.get(state, state)}" for state, count in found.items() if count) or "none"
    for common in summary["failures"][:1]:
        text += f": {common['message']}" + (
            f" ({common['trials']} of them)" if common["trials"] < found[FAILED] else ""
        )
    return text


def _spread_text(metrics: dict[str, Any]) -> str:
    """Mean ± standard deviation over the seeds of a refit."""
    return "  ".join(f"{key} {_plus_minus(spread)}" for key, spread in metrics.items())


def _plus_minus(spread: dict[str, Any]) -> str:
    return number(spread["mean"]) + ("" if spread["std"] is None else f" ± {number(spread['std'])}")


def write_report(
    search: RunDir, config: Config, space: Space, records: list[Record], summary: dict[str, Any]
) -> None:  # fmt: skip
    """Replace search.md in one step.

    Args:
        summary: the content of summary.json.
    """
    objective, aim = config.objective, "highest" if config.objective.mode == "max" else "lowest"
    head = f"{summary['state'].capitalize()}: {_counted(summary)}; {summary['epochs']:,} epochs trained."
    parts = [f"# Search {search.path.name}", f"{head} Looked for: the {aim} {objective.metric}."]
    domains = [[f"`{key}`", f"`{domain}`"] for key, domain in space.domains.items()]
    method = f"Algorithm: {_call(config.search.algorithm)}. Scheduler: {_call(config.search.scheduler)}."
    parts += ["## Searched", _markdown(["setting", "domain"], domains), method]
    parts += ["## Best trials", _best_trials(config, space, records)]
    if summary["importance"]:
        shares = [[f"`{key}`", f"{share:.0%}"] for key, share in summary["importance"].items()]
        parts += ["## What mattered", _markdown(["setting", "share"], shares)]
    if summary["failures"]:
        rows = [[str(each["trials"]), each["message"]] for each in summary["failures"]]
        parts += ["## Failures", _markdown(["trials", "message"], rows)]
    if (refit := summary["refit"]) and refit["runs"]:
        rows = [
            [key, _plus_minus(spread), *map(number, spread["values"])]
            for split in ("val", "test")
            for key, spread in refit[split].items()
        ]
        seeds = [f"seed {seed}" for seed in refit["seeds"]]
        parts += ["## The best, trained anew", _markdown(["metric", "mean ± std", *seeds], rows)]
    elif summary["test"]:
        rows = [[key, number(value)] for key, value in summary["test"].items()]
        parts += ["## The best on test", _markdown(["metric", "value"], rows)]
    first = next(iter(ranked(records, objective.mode)), None)
    if first is not None and first.exploits:
        parts += ["## How the best went", _schedule(space, first)]
    if summary["repeat_command"]:
        parts += ["## Repeat the best", f"```bash\n{summary['repeat_command']}\n```"]
    aside = search.path / ".search.md"
    aside.write_text("\n\n".join(parts) + "\n")
    aside.replace(search.path / "search.md")


def _best_trials(config: Config, space: Space, records: list[Record]) -> str:
    keys, best = settings(space), ranked(records, config.objective.mode)[:10]
    rows = [_trial_row(rank, record, space, keys) for rank, record in enumerate(best, start=1)]
    head = ["rank", "trial", config.objective.metric, "epochs", *keys]
    return _markdown(head, rows) if rows else "None was validated."


def _schedule(space: Space, record: Record) -> str:
    """Under population based training: where a trial took over from another, and the values from there on."""
    rows = [
        [str(each["epoch"]), str(each["donor"]), assignments(space.active(each["values"]))] for each in record.exploits
    ]
    return _markdown(["after epoch", "weights of trial", "values from there"], rows)


def _trial_row(rank: int, record: Record, space: Space, keys: list[str]) -> list[str]:
    values = space.active(values_of(record))
    shown = [brief(values[key]) if key in values else "" for key in keys]
    return [str(rank), str(record.number), number(record.value), str(record.epochs), *shown]


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
