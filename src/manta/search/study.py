"""The events of a search in the order in which they happened, on disk before they count: search.jsonl.

A search that died, however suddenly, is the sum of its events: its trials are read back from here, and its algorithm
and scheduler are told everything once more (see `trials.py`). Imports nothing heavy.
"""

import json
import math
import os
import time
from pathlib import Path
from typing import IO, Any

from manta.config import Objective
from manta.runs import FAILED, RUNNING, STORAGE_FAILED, RunDir, finite, read_lines
from manta.search.record import Record

EVENTS = "search.jsonl"


class Study:
    """All trials of a search.

    Args:
        path: of search.jsonl; what it holds is read, and half a line at its end (a kill in the middle) is dropped.
        read_only: the file is left as it is: a search may be writing it right now.
    """

    def __init__(self, path: Path, objective: Objective, read_only: bool = False) -> None:
        self.objective = objective
        self.records: list[Record] = []
        self.past: list[dict[str, Any]] = read_lines(path)
        """The events of earlier launches."""
        self.storage_failure: str | None = None
        """Of a trial of this launch: the disk that all of them share does not work any more."""
        self.silent = False
        """While they are told again nothing is written."""
        for event in self.past:
            self._apply(event)
        self._file: IO[bytes] | None = None
        if read_only:
            return
        whole = path.read_bytes().rpartition(b"\n") if path.is_file() else (b"", b"", b"")
        self._file = open(path, "ab")
        self._file.truncate(len(whole[0]) + len(whole[1]))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    # --- what happens ------------------------------------------------------------------------------------------------

    def sampled(self, values: dict[str, Any]) -> Record:
        """A new trial."""
        self._happened({"event": "sampled", "trial": len(self.records), "values": values}, sync=True)
        return self.records[-1]

    def reported(
        self, number: int, epoch: int, step: int, metrics: dict[str, float], seconds: float, last: bool = False
    ) -> None:
        """A validation, the last one at the end of a training; one that is known already (repeated after a crash) is left out."""
        if not self.silent and epoch > self.records[number].epoch:
            event = {"event": "reported", "trial": number, "epoch": epoch, "step": step, "metrics": finite(metrics)}
            self._happened({**event, "seconds": round(seconds, 3), "last": last})

    def ended(self, number: int, state: str) -> None:
        """finished or stopped."""
        self._happened({"event": "ended", "trial": number, "state": state}, sync=True)

    def failed(self, number: int, error: str) -> None:
        if error.startswith(STORAGE_FAILED) and not self.silent:
            self.storage_failure = error
        self._happened({"event": "failed", "trial": number, "error": error}, sync=True)

    def retried(self, number: int) -> None:
        """A failed trial is tried again."""
        self._happened({"event": "retried", "trial": number})

    def exploited(self, number: int, donor: int, epoch: int, values: dict[str, Any]) -> None:
        """A trial goes on with the weights of another and new values."""
        self._happened({"event": "exploited", "trial": number, "donor": donor, "epoch": epoch, "values": values}, True)

    def _happened(self, event: dict[str, Any], sync: bool = False) -> None:
        if self.silent:
            return
        assert self._file is not None, "opened to read only"
        self._file.write((json.dumps({**event, "time": round(time.time(), 3)}) + "\n").encode())
        self._file.flush()
        if sync:
            os.fsync(self._file.fileno())
        self._apply(event)

    # --- what it amounts to --------------------------------------------------------------------------------------------

    def _apply(self, event: dict[str, Any]) -> None:
        if event["event"] == "sampled":
            self.records.append(Record(event["trial"], event["values"]))
            return
        record = self.records[event["trial"]]
        match event["event"]:
            case "reported":
                self._report(record, event)
            case "ended":
                record.state, record.error = event["state"], None
            case "failed":
                record.state, record.error = FAILED, event["error"]
            case "retried":
                record.state = RUNNING
            case "exploited":
                record.values = event["values"]
                record.epoch = event["epoch"]
                record.exploits.append({key: event[key] for key in ("donor", "epoch", "values")})

    def _report(self, record: Record, event: dict[str, Any]) -> None:
        record.epochs += event["epoch"] - record.epoch
        record.epoch = event["epoch"]
        record.seconds += event["seconds"]
        value = event["metrics"].get(self.objective.metric)
        if value is not None and math.isfinite(value) and self.better(value, record.value):
            record.best = {
                "value": value,
                "epoch": event["epoch"],
                "step": event["step"],
                "metrics": event["metrics"],
                "values": record.values,
            }

    def better(self, value: float, than: float | None) -> bool:
        sign = 1 if self.objective.mode == "max" else -1
        return than is None or sign * (value - than) > 0

    def best(self) -> Record | None:
        """The trial with the best value so far; of equals the earliest."""
        found: Record | None = None
        for record in self.records:
            if record.value is not None and self.better(record.value, found.value if found else None):
                found = record
        return found


def records_of(search: RunDir, objective: Objective) -> list[Record]:
    """The trials of a search, read from its events."""
    return Study(search.path / EVENTS, objective, read_only=True).records
