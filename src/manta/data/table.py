"""Tables in files (Parquet, CSV, JSON lines) and folders of images: in memory, or read by Ray Data while they are used."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet
import torch
from torch import Tensor

from manta.data import Splits
from manta.data.stream import Stream
from manta.errors import MantaError

SUFFIXES = {".parquet": "parquet", ".csv": "csv", ".jsonl": "json", ".json": "json"}


@dataclass(frozen=True)
class Columns:
    """What of a table's row is the input and what the target."""

    target: str
    features: tuple[str, ...]
    classes: tuple[str, ...]
    """Names of the classes, sorted; empty = the target is a number."""

    def __call__(self, piece: tuple[str, str, int | None]) -> tuple[np.ndarray, np.ndarray]:
        """Rows of a file, or of a row group of one: inputs (n, features) float32; class numbers (n,), or numbers (n, 1)."""
        path, kind, group = piece
        names = [*self.features, self.target]
        if group is None:
            table = pyarrow.dataset.dataset(path, format=kind).to_table(columns=names)
        else:
            table = pyarrow.parquet.ParquetFile(path).read_row_group(group, columns=names)
        try:
            inputs = np.stack([table[name].to_numpy().astype(np.float32) for name in self.features], axis=1)
        except (ValueError, TypeError, pa.ArrowInvalid) as error:
            raise MantaError(f"{path}: an input column is no number: {error}") from error
        return inputs, self._targets(path, table[self.target])

    def _targets(self, path: str, column: Any) -> np.ndarray:
        if not self.classes:
            return column.to_numpy().astype(np.float32).reshape(-1, 1)
        found = np.asarray([str(value) for value in column.to_pylist()])
        numbers = np.searchsorted(self.classes, found).clip(max=len(self.classes) - 1)
        if wrong := set(found[np.asarray(self.classes)[numbers] != found].tolist()):
            raise MantaError(
                f"{path}: {self.target} is {sorted(wrong)[0]}, not one of the training set's {', '.join(self.classes)}."
            )
        return numbers.astype(np.int64)


@dataclass(frozen=True)
class Scaled:
    """Inputs minus their mean, by their deviation."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, inputs: Tensor) -> Tensor:
        mean, std = (torch.tensor(each, dtype=torch.float32, device=inputs.device) for each in (self.mean, self.std))
        return (inputs.float() - mean) / std


def table(
    root: str,
    target: str,
    task: Literal["classification", "regression"],
    engine: Literal["torch", "ray"] = "torch",
    features: list[str] | None = None,
    buffer: int = 10_000,
    tasks: int = 2,
    cpus: float = 0.0,
) -> Splits:
    """root/train, root/val and, if there is one, root/test: each a file or a folder of files of one kind, by their suffix.

    Inputs are scaled to mean 0 and deviation 1 of the training set, which is read once for that.

    Args:
        target: column of what is learned.
        features: columns of the inputs, all numbers; None = all but the target, in the order of the first file.
        engine: torch = everything in memory; ray = streamed (see `Stream`, for buffer, tasks and cpus too).

    Raises:
        MantaError: files are missing, of different kinds, or their columns are not there or no numbers.
    """
    base = Path(root).expanduser()
    found = {name: _files(base, name) for name in ("train", "val", "test")}
    for name in ("train", "val"):
        if not found[name]:
            raise MantaError(
                f"data.root={base} has no {name} split: {base / name} must be a folder of files, or {name} a file, "
                f"that end in {', '.join(SUFFIXES)}."
            )
    columns, scaled = _look(found["train"], target, features, task == "classification")
    parts: list[Any] = []
    for name in ("train", "val", "test"):
        pieces, size = _pieces(found[name])
        stream = Stream(pieces, columns, size, scaled, buffer, tasks, cpus)
        parts.append(None if not pieces else stream if engine == "ray" else stream.whole())
    return Splits(parts[0], parts[1], parts[2], columns.classes)


def _files(base: Path, name: str) -> list[Path]:
    """Of a split, in the order of their names."""
    alone = [path for suffix in SUFFIXES if (path := base / f"{name}{suffix}").is_file()]
    inside = sorted(path for path in (base / name).rglob("*") if path.suffix in SUFFIXES and path.is_file())
    files = alone + inside
    if kinds := sorted({path.suffix for path in files})[1:]:
        raise MantaError(
            f"data.root={base}: the {name} split has files of several kinds ({files[0].suffix}, {kinds[0]})."
        )
    return files


@functools.lru_cache(maxsize=4096)
def _rows(path: str, kind: str, _changed: float) -> tuple[int, ...]:
    """How many rows a file has; of Parquet, each of its row groups."""
    if kind == "parquet":
        data = pyarrow.parquet.ParquetFile(path).metadata
        return tuple(data.row_group(index).num_rows for index in range(data.num_row_groups))
    return (pyarrow.dataset.dataset(path, format=kind).count_rows(),)


def _pieces(files: Sequence[Path]) -> tuple[list[tuple[str, str, int | None]], int]:
    """What is read at a time, and all rows together."""
    pieces: list[tuple[str, str, int | None]] = []
    total = 0
    for path in files:
        kind = SUFFIXES[path.suffix]
        try:
            counts = _rows(str(path), kind, path.stat().st_mtime)
        except (OSError, pa.ArrowInvalid) as error:
            raise MantaError(f"{path} cannot be read: {error}") from error
        pieces += [(str(path), kind, index if kind == "parquet" else None) for index, n in enumerate(counts) if n]
        total += sum(counts)
    return pieces, total


def _look(files: Sequence[Path], target: str, features: list[str] | None, classes: bool) -> tuple[Columns, Scaled]:
    """Columns, and the inputs' scale, from the training set."""
    whole = pyarrow.dataset.dataset([str(path) for path in files], format=SUFFIXES[files[0].suffix])
    known = whole.schema.names
    names = tuple(features if features is not None else [name for name in known if name != target])
    if missing := [name for name in (target, *names) if name not in known]:
        raise MantaError(f"{files[0].parent}: there is no column {missing[0]}; there are {', '.join(known)}.")
    count, total, square = 0, np.zeros(len(names)), np.zeros(len(names))
    seen: set[str] = set()
    for batch in whole.to_batches(columns=[*names, target]):
        try:
            inputs = np.stack([batch[name].to_numpy(zero_copy_only=False).astype(np.float64) for name in names], axis=1)
        except (ValueError, TypeError, pa.ArrowInvalid) as error:
            raise MantaError(
                f"{files[0].parent}: an input column is no number ({error}): name those that are, features=[...]"
            ) from error
        count, total, square = count + len(inputs), total + inputs.sum(axis=0), square + (inputs**2).sum(axis=0)
        if classes:
            seen |= {str(value) for value in batch[target].unique().to_pylist()}
    mean = total / max(count, 1)
    std = np.sqrt(np.maximum(square / max(count, 1) - mean**2, 0))
    return (
        Columns(target, names, tuple(sorted(seen))),
        Scaled(tuple(mean.tolist()), tuple(np.where(std > 0, std, 1).tolist())),
    )
