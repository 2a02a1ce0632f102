"""What W&B wrote offline, read back from its .wandb files: records of protocol buffers in LevelDB's log format."""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32768, 7


@dataclass
class Written:
    """One run's records, all its files together."""

    ids: set[str] = field(default_factory=set)
    rows: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    run: Any = None
    exit_codes: list[int] = field(default_factory=list)

    def points(self) -> list[tuple[str, int, float]]:
        """(metric, optimizer step, value) of all rows."""
        return [
            (key, row["step"], value)
            for row in self.rows
            for key, value in row.items()
            if key not in ("step", "epoch") and not key.startswith("_") and isinstance(value, int | float)
        ]


def read(run: Path) -> Written:
    found = Written()
    for path in sorted(run.glob("wandb/*run-*/*.wandb")):
        if path.parent.is_symlink():
            continue
        for record in _records(path):
            match record.WhichOneof("record_type"):
                case "run":
                    found.run = record.run
                    found.ids.add(record.run.run_id)
                    for item in record.run.config.update:
                        found.config[item.key] = json.loads(item.value_json)
                case "history":
                    found.rows.append({_key(item): json.loads(item.value_json) for item in record.history.item})
                case "summary":
                    found.summary |= {_key(item): json.loads(item.value_json) for item in record.summary.update}
                case "exit":
                    found.exit_codes.append(record.exit.exit_code)
    return found


def _key(item: Any) -> str:
    return item.key or ".".join(item.nested_key)


def _records(path: Path) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    data, position, parts = path.read_bytes(), HEADER, b""
    while position + HEADER <= len(data):
        left = BLOCK - position % BLOCK
        if left < HEADER:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + HEADER])
        if kind == 0:
            return
        parts += data[position + HEADER : position + HEADER + length]
        position += HEADER + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record
