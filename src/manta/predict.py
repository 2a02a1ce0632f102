"""scripts/predict.py: what a checkpoint of a run says of each input, as CSV or Parquet. Imports nothing heavy."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from manta import runs
from manta.config import Cluster, Config, Data, Storage, absolute, from_hydra, register
from manta.errors import FINISHED, MantaError, nearest
from manta.evaluate import find_run, published, saved_config
from manta.storage import bring_back
from manta.view import View, table

if TYPE_CHECKING:
    from manta.data import AnySet, Splits

SPLITS = ("test", "val", "train")
SUFFIXES = (".csv", ".parquet")
ROWS_A_WRITE = 8192


@dataclass
class Arguments:
    """Predictions and probabilities of a checkpoint, one row an input, written as they are made; of a language model a text,
    unless data= or output= is given.

    For example: python scripts/predict.py run=latest data=images/new output=new.parquet
    """

    run: str = "latest"
    """`latest`, or the directory of a run, or of a search (then its best trial)."""
    checkpoint: str = "best"
    """`best`, `last`, or the step of one that was kept."""
    data: str | None = None
    """A folder of images, a .npy or .npz file of inputs, or a data set of conf/data; null = the run's own."""
    split: str = "test"
    """Of a data set: test, val or train."""
    output: str | None = None
    """A .csv or .parquet file; null = predictions.csv in the run directory."""
    prompt: str | None = None
    """Of a language model: what to continue."""
    length: int = 500
    """How many tokens more."""
    temperature: float = 0.8
    """How daring they are; 0 = always the most probable one."""
    seed: int = 0
    """Of the draws."""
    use_gpu: bool | None = None
    """Use a GPU; null = if there is one."""
    storage: Storage = field(default_factory=Storage)
    """Where run=latest is looked for."""
    traceback: bool = False
    """Show Python tracebacks with errors."""


@dataclass
class Source:
    """Inputs with the ids they are known by; classes: names of their targets, None = targets are not known."""

    shown: str
    dataset: "AnySet"
    ids: Sequence[int] | Sequence[str]
    classes: Sequence[str] | None = None


def predict(arguments: Arguments, conf: Path) -> int:
    """Predict, write, and say where; an exit code.

    Args:
        conf: the folder with the group `data`.

    Raises:
        MantaError: the request is invalid, or an input cannot be read.
    """
    if arguments.split not in SPLITS:
        hint = nearest(arguments.split, SPLITS)
        meant = f" Did you mean {hint}?" if hint else ""
        raise MantaError(f"split={arguments.split}: it must be one of {', '.join(SPLITS)}.{meant}")
    if arguments.length < 1 or not 0 <= arguments.temperature < float("inf"):
        raise MantaError(
            f"length={arguments.length} must be >= 1 and temperature={arguments.temperature} a number >= 0."
        )
    view = View()
    run = find_run(arguments.run, arguments.storage, view)
    output = _output(arguments.output, run.path)
    config = saved_config(run, 0, arguments.use_gpu, Cluster())
    place = _place(arguments.data, config, conf)
    alone = arguments.data is None and arguments.output is None
    if arguments.prompt is not None and not alone:
        raise MantaError(
            f"prompt={arguments.prompt!r}: a text is printed, so there is no data= and no output= with it."
        )
    with published(run, arguments.checkpoint) as checkpoint, TemporaryDirectory() as scratch:
        if alone and is_language(config):
            view.say(_text(arguments, run, config, checkpoint))
            return FINISHED
        if arguments.prompt is not None:
            raise MantaError(
                f"prompt={arguments.prompt!r} is for a language model; {runs.short(run.path)} was trained for "
                f"{config.recipe.task['_target_'].rpartition('.')[2]}."
            )
        from manta.recipes import make_recipe
        from manta.session import plain

        own = _splits(config.data, config)
        source = _source(place, arguments.split, own, config, Path(scratch))
        recipe = make_recipe(config)
        session = plain(run, arguments.use_gpu, stop=lambda: False)
        count = correct = 0
        classes = False
        with _writer(output) as write:
            for predicted, probabilities, targets in recipe.predict(session, config, checkpoint, source.dataset):
                write(_columns(source, own.classes, count, predicted, probabilities, targets))
                classes = probabilities is not None and targets.dim() == 1
                count += len(predicted)
                correct += int((predicted == targets).sum()) if classes else 0
    rows = [("checkpoint", f"{arguments.checkpoint} of {run}"), ("inputs", f"{source.shown}: {count:,}")]
    if output.is_relative_to(run.path):
        bring_back(run, arguments.storage, view.say)
    if source.classes is not None and classes:
        rows.append(("accuracy", f"{correct / count:.4f}"))
    view.say(table("Predictions", [*rows, ("written to", runs.short(output))]))
    return FINISHED


def is_language(config: Config) -> bool:
    """Whether a run's checkpoints can write a text."""
    from manta.recipes import make_recipe
    from manta.training.tasks import LanguageModeling, make_task

    return isinstance(make_task(config), LanguageModeling) and hasattr(make_recipe(config), "generate")


def _text(arguments: Arguments, run: runs.RunDir, config: Config, checkpoint: Path) -> str:
    """The prompt and what the model makes of it, fit for a terminal."""
    from manta.recipes import make_recipe
    from manta.session import plain
    from manta.training.evaluation import Prompt

    prompt = "\n" if arguments.prompt is None else arguments.prompt
    session = plain(run, arguments.use_gpu, stop=lambda: False)
    asked = Prompt(prompt, arguments.length, arguments.temperature, arguments.seed)
    text = make_recipe(config).generate(session, config, checkpoint, asked)
    return "".join(each if each.isprintable() or each in "\n\t" else "\N{REPLACEMENT CHARACTER}" for each in text)


def _output(asked: str | None, run: Path) -> Path:
    """The file to write."""
    path = run / "predictions.csv" if asked is None else Path(absolute(asked))
    if path.suffix.lower() not in SUFFIXES:
        raise MantaError(f"output={asked}: its name must end in {' or '.join(SUFFIXES)}.")
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise MantaError(f"output={path} cannot be written: {path.parent} must be a folder that you may write to.")
    return path


# --- inputs ------------------------------------------------------------------------------------------------------


def _place(asked: str | None, config: Config, conf: Path) -> Data | Path:
    """Where inputs come from: a data set's configuration (the run's own by its name, too), or a path."""
    if asked is None or asked == config.data.name:
        return config.data
    options = sorted(path.stem for path in (conf / "data").glob("*.yaml"))
    if asked in options:
        return _option(asked, config, conf)
    path = Path(asked).expanduser()
    if not path.exists():
        hint = nearest(asked, options)
        meant = f" Did you mean {hint}?" if hint else f" Data sets: {', '.join(options)}."
        raise MantaError(
            f"data={asked}: no such folder or file, and no data set of {runs.short(conf / 'data')}.{meant}"
        )
    if not path.is_dir() and path.suffix.lower() not in (".npy", ".npz"):
        raise MantaError(f"data={asked}: it must be a folder of images, or end in .npy or .npz.")
    return path


def _option(name: str, config: Config, conf: Path) -> Data:
    """Another data set, from the run's data folder; its samples must have the shape that the model takes."""
    from hydra import compose, initialize_config_dir

    register()
    with initialize_config_dir(str(conf), version_base="1.3"):
        cfg = compose("config", [f"data={name}"])
    cfg.data.root, cfg.data.download = config.data.root, config.data.download
    data = from_hydra(cfg).data
    if data.input_shape != config.data.input_shape:
        raise MantaError(
            f"data={name} has inputs of shape {data.input_shape}; the run's model takes {config.data.input_shape}."
        )
    return data


def _source(place: Data | Path, split: str, own: "Splits", config: Config, scratch: Path) -> Source:
    """Open the inputs."""
    from manta.data.inputs import array_file, image_files

    if isinstance(place, Path):
        if place.is_dir():
            return Source(str(place), *image_files(place, own, config.data))
        return Source(str(place), *array_file(place, own, config.data, scratch))
    splits = own if place is config.data else _splits(place, config)
    dataset: Any = getattr(splits, split)
    if dataset is None:
        raise MantaError(f"split={split}: data set {place.name} has no {split} split. Use split=val.")
    return Source(f"{place.name}, {split}", dataset, range(len(dataset)), splits.classes)


def _splits(data: Data, config: Config) -> "Splits":
    """A data set whose targets the run's task knows."""
    from manta.data.load import load_splits
    from manta.training.tasks import make_task

    return load_splits(data, config.allowed_targets, make_task(config).check_targets)


# --- output ------------------------------------------------------------------------------------------------------


def _columns(
    source: Source, names: Sequence[str], start: int, predicted: Any, probabilities: Any, targets: Any
) -> dict[str, Any]:
    """A batch of tensors, column by column; names: of the run's classes, empty = their numbers."""
    columns: dict[str, Any] = {"id": list(source.ids[start : start + len(predicted)])}
    if source.classes is not None and targets.dim() == 1:
        columns["target"] = [source.classes[target] for target in targets] if source.classes else targets.numpy()
    if probabilities is None:
        return columns | _numbered("target", targets, source.classes is not None) | _numbered("prediction", predicted)
    columns["prediction"] = [names[number] for number in predicted] if names else predicted.numpy()
    columns["probability"] = probabilities[range(len(predicted)), predicted].numpy()
    for number in range(probabilities.shape[1]):
        columns[f"p_{names[number] if names else number}"] = probabilities[:, number].numpy()
    return columns


def _numbered(name: str, values: Any, known: bool = True) -> dict[str, Any]:
    """Columns of (n,) or (n, k) numbers."""
    if not known:
        return {}
    if values.dim() == 1 or values.shape[1:].numel() == 1:
        return {name: values.flatten().numpy()}
    return {f"{name}_{index}": column.numpy() for index, column in enumerate(values.flatten(1).unbind(1))}


@contextmanager
def _writer(path: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Write columns, batch by batch, to a file that is there when all of it is."""
    import pyarrow as pa
    from pyarrow.csv import CSVWriter
    from pyarrow.parquet import ParquetWriter

    aside = path.with_name(f".{path.name}.{os.getpid()}")
    waiting: list[Any] = []
    file: Any = None

    def flush() -> None:
        nonlocal file
        if waiting:
            whole = pa.concat_tables(waiting).combine_chunks()
            if file is None:
                file = (CSVWriter if path.suffix.lower() == ".csv" else ParquetWriter)(str(aside), whole.schema)
            file.write_table(whole)
            waiting.clear()

    def write(columns: dict[str, Any]) -> None:
        waiting.append(pa.table(columns))
        if sum(map(len, waiting)) >= ROWS_A_WRITE:
            flush()

    try:
        yield write
        flush()
        file.close()
        aside.replace(path)
    finally:
        if file is not None:
            file.close()
        aside.unlink(missing_ok=True)
