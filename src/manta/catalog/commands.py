"""scripts/runs.py: its commands and their options. Each command is a function of the arguments and a `Hand`."""

import argparse
import os
import re
import shlex
import signal
import socket
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import NoReturn

from manta import runs
from manta.catalog import details, listing, paper, remove, render, rerun
from manta.catalog.choose import add_filters, chosen, has_filters
from manta.catalog.entries import Entry, newest, pick, scan
from manta.catalog.settings import Defaults
from manta.cluster import elsewhere
from manta.config import Storage, absolute, from_hydra
from manta.env import load_env_file
from manta.errors import FAILED, FINISHED, MantaError, exit_code, nearest
from manta.runs import RunDir
from manta.tracking import NAMES
from manta.view import Terminal, table

RUN_HELP = "`latest`, a run directory, or a unique part of its date, time and name"


class Hand:
    """What every command needs: the defaults, the storage and the terminal."""

    def __init__(self, root: Path, storage: str | None) -> None:
        self.root, self._storage = root, storage
        self.defaults = Defaults(root / "conf")
        self.terminal = Terminal(file=sys.stdout, highlight=False, soft_wrap=True)

    @cached_property
    def storage(self) -> Path:
        if self.settings.is_remote:
            from manta.storage.remote import refresh

            return refresh(self.settings)
        return self.settings.folder

    @cached_property
    def settings(self) -> Storage:
        found = self.defaults.storage
        return replace(found, path=absolute(self._storage)) if self._storage else found

    def pick(self, spec: str) -> Entry:
        return pick(spec, self.storage, self.defaults)

    def filtered(self, arguments: Namespace) -> list[Entry]:
        return list(chosen(scan(self.storage, self.defaults), arguments, self.defaults))

    def warn(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class _Parser(ArgumentParser):
    """Mistakes are MantaErrors."""

    def error(self, message: str) -> NoReturn:
        if wrong := re.match(r"argument COMMAND: invalid choice: '(.*?)'", message):
            found = nearest(wrong[1], COMMANDS)
            hint = f" Did you mean {found}?" if found else ""
            raise MantaError(f"{wrong[1]}: there is no such command, but {', '.join(COMMANDS)}.{hint}")
        raise MantaError(f"{message}. `{self.prog} --help` shows how it is used.")


def main(argv: Sequence[str], root: Path) -> int:
    """Run a command; an exit code.

    Args:
        argv: the script, then what was typed.
        root: where conf/, train.py and `.env` lie.
    """

    def call() -> int:
        load_env_file(root / ".env")
        arguments = parse(argv)
        try:
            code = COMMANDS[arguments.command](arguments, Hand(root, arguments.storage))
            sys.stdout.flush()
        except BrokenPipeError:  # `| head` has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return FINISHED
        return code

    return exit_code(call)


def parse(argv: Sequence[str]) -> Namespace:
    """Typed arguments; those that lie behind an option belong to the command's list too.

    Raises:
        MantaError: what is typed cannot be understood.
    """
    parser = make_parser(argv[0])
    arguments, rest = parser.parse_known_args(argv[1:])
    options = [text for text in rest if text.startswith("-")]
    if options or (rest and arguments.many is None):
        wrong = (options or rest)[0]
        known = [text for text in _options(parser, arguments.command) if text.startswith("--")]
        found = nearest(wrong.partition("=")[0], known)
        hint = f" Did you mean {found}?" if found else ""
        raise MantaError(f"{wrong}: `{arguments.command}` does not know this.{hint} --help shows what there is.")
    if rest:
        setattr(arguments, arguments.many, [*getattr(arguments, arguments.many), *rest])
    arguments.argv = list(argv)
    return arguments


def make_parser(script: str) -> ArgumentParser:
    """The command line; each command has its own --help."""
    parser = _Parser(prog=f"python {script}", description="Runs at hand.", allow_abbrev=False)
    parser.add_argument("--storage", metavar="FOLDER", help="where runs are (default: storage.path of conf/)")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)

    def add(name: str, help_text: str, many: str | None = None) -> ArgumentParser:
        formatter = RawDescriptionHelpFormatter
        found = commands.add_parser(name, help=help_text, description=help_text, formatter_class=formatter, allow_abbrev=False)  # fmt: skip
        found.add_argument("--storage", metavar="FOLDER", default=argparse.SUPPRESS, help="where runs are")
        found.set_defaults(many=many)
        return found

    listed = add("list", "Runs, the newest first.")
    add_filters(listed)
    listed.add_argument("--sort", default="date", metavar="BY", help="date, objective (the best first) or duration")
    listed.add_argument("--limit", type=int, metavar="N", help="at most so many")
    listed.add_argument("--trials", action="store_true", help="trials and refits of searches too")
    _add_format(listed)
    add("clean", "Remove what killed launches left behind: folders and processes of their Ray. No run is touched.")
    add("show", "Everything about one run.").add_argument("run", metavar="RUN", help=RUN_HELP)
    compared = add("compare", "What differs between runs: settings, metrics (* is the better), code.", many="runs")
    compared.add_argument("runs", nargs="+", metavar="RUN", help=RUN_HELP)
    _add_format(compared)
    tabled = add("table", "For a paper: mean and deviation over runs that differ only in their seed.", many="runs")
    tabled.add_argument(
        "runs", nargs="*", metavar="RUN", help=f"{RUN_HELP}; none = all finished ones that pass the filters"
    )
    add_filters(tabled)
    tabled.add_argument(
        "--metrics", metavar="A,B", help="e.g. test/accuracy,val/loss (default: those of the objective)"
    )
    _add_format(tabled)
    add_filters(add("latest", "The path of the newest run (that passes the filters)."))
    again = add("rerun", "Start train.py again as the run was, with more overrides.", many="overrides")
    again.add_argument("run", metavar="RUN", help=RUN_HELP)
    again.add_argument("overrides", nargs="*", metavar="SETTING=VALUE", help="as for train.py")
    again.add_argument("--print", action="store_true", help="only print the command")
    removed = add("rm", "Delete run directories.", many="runs")
    removed.add_argument("runs", nargs="*", metavar="RUN", help=RUN_HELP)
    add_filters(removed)
    removed.add_argument("--yes", action="store_true", help="do not ask")
    told = add("sync", "Tell a tracker what it missed, or everything; done twice it changes nothing.", many="runs")
    told.add_argument("runs", nargs="+", metavar="RUN", help=RUN_HELP)
    told.add_argument("--to", required=True, metavar="TRACKER", help=f"{', '.join(NAMES)}, or all that the run has on")
    told.add_argument("--tracking-uri", metavar="URI", help="of MLflow, instead of the run's own")
    brought = add("upload", "Bring to its bucket what is not there yet (storage.path=s3://...).", many="runs")
    brought.add_argument("runs", nargs="+", metavar="RUN", help=RUN_HELP)
    followed = add("logs", "What a run says, as it comes; its exit code, if it runs on a cluster.")
    followed.add_argument("run", metavar="RUN", help=f"{RUN_HELP}; or job:<id>@<address>")
    stopped = add("stop", "Ask a run that trains to end after a checkpoint.")
    stopped.add_argument("run", metavar="RUN", help=f"{RUN_HELP}; or job:<id>@<address>")
    exported = add("csv", "The metrics of a run as CSV, one row a report.")
    exported.add_argument("run", metavar="RUN", help=RUN_HELP)
    exported.add_argument("--output", metavar="FILE", help="write there instead of to the terminal")
    return parser


def _add_format(parser: ArgumentParser) -> None:
    parser.add_argument("--format", default="table", metavar="FORMAT", help=", ".join(render.FORMATS))


def _options(parser: ArgumentParser, command: str) -> list[str]:
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return list(commands.choices[command]._option_string_actions)


def _check_format(form: str) -> None:
    if form not in render.FORMATS:
        found = nearest(form, render.FORMATS)
        hint = f" Did you mean {found}?" if found else ""
        raise MantaError(f"--format {form}: it must be of {', '.join(render.FORMATS)}.{hint}")


# --- the commands ------------------------------------------------------------------------------------------------


def _list(arguments: Namespace, hand: Hand) -> int:
    _check_format(arguments.format)
    found = listing.rows(arguments, hand.storage, hand.defaults)
    if arguments.format in ("json", "csv"):
        records = [listing.record(entry) for entry in found]
        render.render(render.Table([], [], records), arguments.format, hand.terminal)
    elif found:
        render.render(listing.table(found), arguments.format, hand.terminal)
    else:
        hand.warn(listing.nothing(hand.storage))
    return FINISHED


def _show(arguments: Namespace, hand: Hand) -> int:
    entry = hand.pick(arguments.run)
    rows = details.show(entry)
    below = "\n" + " " * (max(len(what) for what, _ in rows) + 2)
    hand.terminal.print(table("Run", [(what, value.replace("\n", below)) for what, value in rows]))
    return FINISHED


def _compare(arguments: Namespace, hand: Hand) -> int:
    _check_format(arguments.format)
    entries = [hand.pick(spec) for spec in arguments.runs]
    if len(entries) < 2:
        raise MantaError(f"compare takes two runs or more: `compare {arguments.runs[0]} latest`, for example.")
    render.render(details.compare(entries), arguments.format, hand.terminal)
    return FINISHED


def _table(arguments: Namespace, hand: Hand) -> int:
    _check_format(arguments.format)
    entries = _asked(arguments, hand)[::-1] if arguments.runs else hand.filtered(arguments)
    known = [entry for entry in entries if entry.kind != "search" and entry.config]
    if not arguments.runs and not arguments.state:
        known = [entry for entry in known if entry.state == runs.FINISHED]
    if not known:
        raise MantaError(
            f"No finished run under {runs.short(hand.storage)} is like that: there is nothing to put in a table."
        )
    if len(known) < len(entries):
        hand.warn(f"{len(entries) - len(known)} of {len(entries)} left out: searches, or not finished.")
    repeated = sum(row.repeated for row in paper.collect(known))
    if repeated:
        hand.warn(f"{repeated} left out: newer runs of the same settings and seed are there.")
    metrics = [name.strip() for name in arguments.metrics.split(",")] if arguments.metrics else None
    render.render(paper.paper_table(known, metrics), arguments.format, hand.terminal)
    return FINISHED


def _latest(arguments: Namespace, hand: Hand) -> int:
    if not has_filters(arguments):
        print(newest(hand.storage, hand.defaults))
        return FINISHED
    found = next(chosen(scan(hand.storage, hand.defaults), arguments, hand.defaults), None)
    if found is None:
        raise MantaError(listing.nothing(hand.storage))
    print(found)
    return FINISHED


def _rerun(arguments: Namespace, hand: Hand) -> int:
    entry = hand.pick(arguments.run)
    overrides = rerun.overrides_of(entry, arguments.overrides)
    warning = rerun.warning(entry)
    if warning:
        hand.warn(warning)
    print(shlex.join(rerun.command(hand.root, overrides)), flush=True)
    if not arguments.print:
        os.execv(sys.executable, [sys.executable, str(hand.root / "train.py"), *overrides])
    return FINISHED


def _rm(arguments: Namespace, hand: Hand) -> int:
    if hand.settings.is_remote:
        raise MantaError(
            f"rm deletes no objects of {hand.settings.path}. For a run there: aws s3 rm --recursive "
            f"{hand.settings.path}/<date>/<time>, and here: rm -r {runs.short(hand.settings.folder)}/<date>/<time>"
        )
    entries = _asked(arguments, hand)
    if not entries:
        hand.warn(listing.nothing(hand.storage))
        return FINISHED
    for entry in entries:
        remove.check(entry, hand.storage)
    sizes = remove.sizes(entries)
    for entry, size in zip(entries, sizes, strict=True):
        print(f"{entry}  {entry.kind}, {entry.state}, {render.size(size)}")
    total = f"{len(entries)} {'run' if len(entries) == 1 else 'runs'}, {render.size(sum(sizes))}"
    if not arguments.yes and not _agreed(total, arguments):
        print("Nothing deleted.")
        return FINISHED
    try:
        for entry in entries:
            remove.remove(entry, hand.storage)
    finally:
        remove.mend_latest(hand.storage, hand.defaults)
    print(f"Deleted {total}.")
    return FINISHED


def _asked(arguments: Namespace, hand: Hand) -> list[Entry]:
    """Runs by name, or by filters.

    Raises:
        MantaError: by both, or by neither.
    """
    if bool(arguments.runs) == has_filters(arguments):
        both = (
            "runs, or filters such as --state failed, not both"
            if arguments.runs
            else "a run, or a filter such as --state failed"
        )
        raise MantaError(f"{arguments.command}: name {both}.")
    if not arguments.runs:
        return hand.filtered(arguments)
    return list({entry.path: entry for entry in map(hand.pick, arguments.runs)}.values())


def _agreed(total: str, arguments: Namespace) -> bool:
    """Whether somebody types yes.

    Raises:
        MantaError: nobody can be asked.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        again = shlex.join(["python", *arguments.argv, "--yes"])
        raise MantaError(f"{total}: deleting takes a yes, and there is no terminal to ask on. If it is meant: {again}")
    try:
        return input(f"Delete {total}? Type yes: ").strip().lower() == "yes"
    except EOFError:
        return False


def _csv(arguments: Namespace, hand: Hand) -> int:
    entry = hand.pick(arguments.run)
    text, damaged = listing.metrics_csv(entry)
    if damaged:
        hand.warn(f"{damaged} line(s) of {entry}/metrics.jsonl are damaged or cut off, and left out.")
    if arguments.output is None:
        sys.stdout.write(text)
        return FINISHED
    try:
        Path(arguments.output).write_text(text)
    except OSError as error:
        raise MantaError(f"--output {arguments.output} cannot be written: {error.strerror}.") from error
    return FINISHED


def _upload(arguments: Namespace, hand: Hand) -> int:
    from manta.resume import load
    from manta.storage.remote import upload, url_of

    code = FINISHED
    for spec in arguments.runs:
        run = RunDir(hand.pick(spec).path)
        if runs.is_locked(run):
            raise MantaError(f"{run} is training right now, and comes to its bucket as it goes.")
        saved = from_hydra(load(run)).storage
        saved = replace(saved, endpoint_url=hand.settings.endpoint_url or saved.endpoint_url)
        here = replace(saved, cache=hand.settings.cache)  # it may have been trained on another machine
        settings = here if url_of(run, saved) is None else saved
        if (url := url_of(run, settings)) is None:
            raise MantaError(f"{run} does not belong to a bucket: it was trained with storage.path={saved.path}.")
        if upload(run, settings, hand.warn):
            print(f"{run}: all of it is in {url}", flush=True)
        else:
            code = FAILED
    return code


def _logs(arguments: Namespace, hand: Hand) -> int:
    if found := elsewhere.find(arguments.run):
        module, name = found
        return int(module.logs(name))
    run = RunDir(hand.pick(arguments.run).path)
    if not run.log.is_file() and runs.launcher(run) is None:
        raise MantaError(f"{run} has no train.log.")
    while not run.log.is_file():
        time.sleep(0.2)
    with open(run.log, errors="replace") as file:
        while True:
            runs_on = runs.launcher(run) is not None  # asked before the last lines are read
            for text in iter(partial(file.read, 1 << 16), ""):
                sys.stdout.write(text)
            sys.stdout.flush()
            if not runs_on:
                return FINISHED
            time.sleep(0.5)


def _stop(arguments: Namespace, hand: Hand) -> int:
    if found := elsewhere.find(arguments.run):
        module, name = found
        return int(module.stop(name))
    run = RunDir(hand.pick(arguments.run).path)
    process = runs.launcher(run)
    if not process:
        raise MantaError(f"{run} is not running: there is nothing to stop.")
    host, pid = process["host"], process["pid"]
    if host != socket.gethostname():
        raise MantaError(f"{run} runs on {host}. Stop it there: kill -TERM {pid}")
    try:
        os.kill(pid, signal.SIGTERM)
    except OSError as error:
        raise MantaError(f"{run}: its process {pid} cannot be stopped: {error.strerror}.") from error
    print(f"{run} is asked to stop after a checkpoint.")
    return FINISHED


def _sync(arguments: Namespace, hand: Hand) -> int:
    from manta.tracking.sync import sync

    for entry in [hand.pick(spec) for spec in arguments.runs]:
        for name in _trackers(entry) if arguments.to == "all" else [arguments.to]:
            uri = arguments.tracking_uri if name == "mlflow" or arguments.to != "all" else None
            sync(RunDir(entry.path), name, lambda text: print(text, flush=True), uri)
    return FINISHED


def _clean(_arguments: Namespace, _hand: Hand) -> int:
    from manta.cluster.own import remove_sessions

    removed = remove_sessions()
    print("\n".join(f"removed {folder}" for folder in removed) or "nothing was left")
    return FINISHED


def _trackers(entry: Entry) -> list[str]:
    """Those that are switched on for a run.

    Raises:
        MantaError: none is.
    """
    found = [name for name in NAMES if entry.config.get(f"tracking.{name}.enabled")]
    if not found:
        raise MantaError(f"--to all: no tracker was switched on for {entry}. Name one: --to {NAMES[1]}")
    return found


COMMANDS: dict[str, Callable[[Namespace, Hand], int]] = {
    "list": _list,
    "show": _show,
    "compare": _compare,
    "table": _table,
    "latest": _latest,
    "rerun": _rerun,
    "rm": _rm,
    "csv": _csv,
    "sync": _sync,
    "clean": _clean,
    "logs": _logs,
    "stop": _stop,
    "upload": _upload,
}
