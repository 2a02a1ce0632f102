"""The process between Ray Data and the ranks of a run: it has the rows of a stream in their order, and hands each rank its own."""

from collections.abc import Iterator, Sequence

import numpy as np

from manta.data.stream import Stream
from manta.training.sampler import mix

AHEAD = 4
"""Pieces that are read ahead."""


class Feeder:
    """Rows of a stream, by number, in windows that only move on; an actor that all ranks of a run ask.

    The order of rows depends on the stream, the seed and the epoch alone: not on the ranks, nor on which piece is read first.
    """

    def __init__(self, stream: Stream, seed: int, shuffle: bool, world_size: int) -> None:
        self.stream, self.seed, self.shuffle, self.world_size = stream, seed, shuffle, world_size
        self.turn: int | None = None
        self.kept: list[tuple[np.ndarray, np.ndarray]] = []
        """All pieces of a stream that is no longer than its buffer: starting Ray Data takes seconds, each time."""

    def take(self, turn: int, epoch: int, rank: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Raw inputs and targets of these rows.

        Args:
            turn: counts passes over the stream; all ranks are in the same.
            rows: of one rank they never go back within a turn.
        """
        if turn != self.turn:
            self._begin(turn, epoch)
        self.seen[rank] = int(rows.min())
        while self.start + self.held <= int(rows.max()):
            self._read()
        self._forget()
        return self._rows(rows)

    def _begin(self, turn: int, epoch: int) -> None:
        self.turn = turn
        self.seen = dict.fromkeys(range(self.world_size), 0)
        self.parts: list[tuple[np.ndarray, np.ndarray]] = []
        self.start, self.held = 0, 0
        """Number of the first row in `parts`, and how many are there."""
        self.source = self._shuffled(epoch) if self.shuffle else self._pieces(range(len(self.stream.pieces)))

    def _read(self) -> None:
        part = next(self.source, None)
        if part is None:
            raise RuntimeError(
                f"the data has {self.start + self.held:,} rows, not the {len(self.stream):,} that it had at first"
            )
        self.parts.append(part)
        self.held += len(part[0])

    def _forget(self) -> None:
        """Parts that all ranks are past."""
        passed = min(self.seen.values())
        while len(self.parts) > 1 and self.start + len(self.parts[0][0]) <= passed:
            gone = len(self.parts.pop(0)[0])
            self.start, self.held = self.start + gone, self.held - gone

    def _rows(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        bounds = np.cumsum([self.start, *(len(inputs) for inputs, _ in self.parts)])
        at = np.searchsorted(bounds, rows, side="right") - 1
        found = [(index, rows[at == index] - bounds[index]) for index in np.unique(at)]
        inputs, targets = ([self.parts[index][side][where] for index, where in found] for side in (0, 1))
        return np.concatenate(inputs), np.concatenate(targets)

    def _shuffled(self, epoch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Pieces in random order, and `buffer` rows of them at a time once more."""
        random = np.random.default_rng(mix(self.seed, epoch))
        waiting: list[tuple[np.ndarray, np.ndarray]] = []
        for part in self._pieces(random.permutation(len(self.stream.pieces)).tolist()):
            waiting.append(part)
            if sum(len(inputs) for inputs, _ in waiting) >= self.stream.buffer:
                yield _mixed(waiting, random)
                waiting = []
        if waiting:
            yield _mixed(waiting, random)

    def _pieces(self, order: Sequence[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        if len(self.stream) > self.stream.buffer:
            yield from self._streamed(order)
            return
        self.kept = self.kept or list(self._streamed(range(len(self.stream.pieces))))
        yield from (self.kept[index] for index in order)

    def _streamed(self, order: Sequence[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """What tasks of Ray Data read, in this order."""
        import ray.data
        from ray.data import DataContext

        context = DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_options.preserve_order = True
        pieces = self.stream.pieces
        items = ray.data.from_items([{"piece": pieces[index]} for index in order], override_num_blocks=len(order))
        read = items.map_batches(
            _Reader(self.stream),
            batch_size=1,
            batch_format="numpy",
            num_cpus=self.stream.cpus,
            concurrency=self.stream.tasks,  # each a process that imports torch: 28 at once took 2 minutes of two cores
        )
        for batch in read.iter_batches(batch_size=None, batch_format="numpy", prefetch_batches=AHEAD):
            yield batch["inputs"], batch["targets"]


class _Reader:
    """`Stream.read` as Ray Data calls it."""

    def __init__(self, stream: Stream) -> None:
        self.read = stream.read

    def __call__(self, batch: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        for piece in batch["piece"]:
            inputs, targets = self.read(piece)
            yield {"inputs": inputs, "targets": targets}


def _mixed(parts: list[tuple[np.ndarray, np.ndarray]], random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    inputs, targets = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = random.permutation(len(inputs))
    return inputs[order], targets[order]
