"""Text for language models: the bytes of your files, or of Python's own standard library. No tokenizer, no download."""

import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from manta.data import Splits, TensorSet
from manta.errors import MantaError

STDLIB = "stdlib"
SKIPPED = (
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "encodings",
    "pydoc_data",
    "__pycache__",
)  # of Python's own


def tokens(inputs: Tensor) -> Tensor:
    """Bytes as token ids, int64."""
    return inputs.long()


def text(
    root: str,
    block_size: int,
    suffixes: list[str],
    max_bytes: int | None = None,
    split_seed: int = 0,
    val_fraction: float = 0.1,
) -> Splits:
    """Blocks of `block_size` bytes and the same one byte further; those of a split come from files of their own.

    Files are shuffled by a fixed seed, so that `max_bytes` takes a fair part; then the test split gets the first of them and
    validation some that `split_seed` chooses, each about `val_fraction` of the bytes. One file alone is cut into three parts.
    What does not fill a block at the end of a split is left out.

    Args:
        root: a text file, a folder of them, or `stdlib`.

    Raises:
        ValueError: a number is out of range.
        MantaError: there is no text, or not enough.
    """
    if block_size < 1 or not 0 < val_fraction < 0.5:
        raise ValueError(f"block_size={block_size} must be >= 1, val_fraction={val_fraction} between 0 and 0.5")
    parts = _read(root, suffixes, max_bytes)
    held = max(int(val_fraction * sum(map(len, parts))), block_size + 1)
    if len(parts) < 3:
        whole = b"\n".join(parts)
        test, val, train = whole[:held], whole[held : 2 * held], whole[2 * held :]
    else:
        test, rest = _take(parts, held)
        order = np.random.default_rng(split_seed).permutation(len(rest))
        val, left = _take([rest[index] for index in order], held)
        train = b"".join(left)
    splits = []
    for name, part in (("train", train), ("val", val), ("test", test)):
        if len(part) <= block_size:
            raise MantaError(
                f"data.root={root}: the {name} split has {len(part):,} bytes, less than a block of data.input_shape="
                f"[{block_size}]. Give more text, or smaller blocks."
            )
        splits.append(_blocks(part, block_size))
    return Splits(splits[0], splits[1], splits[2])


def _take(parts: list[bytes], size: int) -> tuple[bytes, list[bytes]]:
    """The first parts, `size` bytes or more, and the rest, of which there is at least one."""
    count = total = 0
    while total < size and count < len(parts) - 1:
        total += len(parts[count])
        count += 1
    return b"".join(parts[:count]), parts[count:]


def _blocks(text: bytes, size: int) -> TensorSet:
    found = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    count = (len(found) - 1) // size
    inputs, targets = (found[shift : shift + count * size].view(count, size) for shift in (0, 1))
    return TensorSet(inputs, targets, tokens)


def _read(root: str, suffixes: list[str], max_bytes: int | None) -> list[bytes]:
    """The contents of files, in an order that depends on their names alone."""
    left, found = max_bytes if max_bytes is not None else float("inf"), []
    for path in _files(root, suffixes):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise MantaError(f"data.root={root}: {path} cannot be read: {error.strerror}.") from error
        if content.strip():
            found.append(content[: int(min(left, len(content)))])
            left -= len(found[-1])
        if left <= 0:
            break
    if not found:
        raise MantaError(
            f"data.root={root} has no text in it: name a text file, a folder with files that end in {', '.join(suffixes)} "
            "(data.dataset.suffixes), or stdlib, Python's own sources."
        )
    return found


def _files(root: str, suffixes: list[str]) -> list[Path]:
    own = Path(root).name == STDLIB and not Path(root).exists()  # a path is made absolute before it comes here
    base = Path(sysconfig.get_path("stdlib")) if own else Path(root).expanduser()
    if base.is_file():
        return [base]
    names = sorted(
        path.relative_to(base).as_posix()
        for path in base.rglob("*")
        if path.suffix in suffixes and path.is_file() and not (own and set(SKIPPED) & set(path.relative_to(base).parts))
    )
    return [base / names[index] for index in np.random.default_rng(0).permutation(len(names))]
