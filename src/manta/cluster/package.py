"""The code of the project as one archive: what git would take, and never data, results, secrets or environments."""

import json
import logging
import os
import subprocess
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from manta.errors import MantaError
from manta.runs import SENT, version

NEVER = (".git", ".ssh", ".aws", "__pycache__", "node_modules", ".env")
"""Names that are left out wherever they are, and `.env.*` with them."""
NEVER_HERE = ("data", "outputs", "multirun")
"""Folders that are left out where they are beside train.py, whatever is in git."""


@dataclass
class Package:
    """An archive, and what is in it."""

    path: Path
    files: list[str] = field(default_factory=list)
    """From the project's folder."""
    left_out: list[str] = field(default_factory=list)
    """Links that lead out of the project, or to folders: nobody else would see where they lead."""
    size: int = 0
    """Bytes of the archive."""

    def __str__(self) -> str:
        files = f"{len(self.files)} {'file' if len(self.files) == 1 else 'files'}, {megabytes(self.size)}"
        if not self.left_out:
            return files
        shown = ", ".join(self.left_out[:5]) + (f" and {len(self.left_out) - 5} more" if self.left_out[5:] else "")
        return f"{files} (not in it, for they are links out of the project or to folders: {shown})"


def megabytes(size: float) -> str:
    return f"{size / 1e6:.1f} MB"


def pack(project: Path, archive: Path, limit: int, without: tuple[Path, ...] = ()) -> Package:
    """Put the project's code into a zip file; the same code makes the same bytes.

    Args:
        limit: bytes that the archive may have.
        without: more folders that are left out.

    Raises:
        MantaError: it is larger, or a file cannot be read.
    """
    package, sizes = Package(archive), Counter[str]()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as zipped:
        for file in sorted(_candidates(project)):
            if _is_never(file, project, without):
                continue
            if file.is_symlink() and not _leads_to_code(file, project, without):
                package.left_out.append(str(file.relative_to(project)))
                continue
            if not file.is_file():  # deleted, but git does not know yet
                continue
            name = file.relative_to(project)
            sizes[f"{name.parent}/" if name.parent != Path() else name.name] += file.stat().st_size
            package.files.append(str(name))
            if package.size <= limit:  # beyond it only sizes are of interest
                _add(zipped, file, str(name))
                package.size = archive.stat().st_size
        if (known := _version(project)) is not None:
            zipped.writestr(zipfile.ZipInfo(SENT), known, zipfile.ZIP_DEFLATED)
            package.files.append(SENT)
    if package.size > limit or archive.stat().st_size > limit:
        largest = ", ".join(f"{name} {megabytes(size)}" for name, size in sizes.most_common(4))
        raise MantaError(
            f"The code in {project} is too large to be sent: Ray takes archives of {megabytes(limit)} at most, and its "
            f"{len(package.files)} files have {megabytes(sum(sizes.values()))}. Largest: {largest}. Name in .gitignore what is "
            "no code, and put data where the cluster sees it (data.root=/shared/data)."
        )
    package.size = archive.stat().st_size
    return package


def _add(zipped: zipfile.ZipFile, file: Path, name: str) -> None:
    entry = zipfile.ZipInfo(name)  # of one date, so that code that was not changed is not sent again
    entry.external_attr = (file.stat().st_mode & 0xFFFF) << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    try:
        with open(file, "rb") as source, zipped.open(entry, "w") as target:
            while block := source.read(1 << 20):
                target.write(block)
    except OSError as error:
        raise MantaError(
            f"{file} cannot be read: {error.strerror}. Name it in .gitignore if the cluster can do without."
        ) from error


def _version(project: Path) -> str | None:
    """What git knows of the code, for the provenance of the run; what never travels is not in it."""
    names = [*NEVER, ".env.*", *(f"{name}/**" for name in NEVER)]
    without = [f":(exclude,glob)**/{name}" for name in names] + [f":(exclude){name}" for name in NEVER_HERE]
    found = version(project, ".", *without)
    return json.dumps(found) if found["commit"] else None


def _candidates(project: Path) -> Iterator[Path]:
    """What git has, or would take; without a checkout, what the .gitignore files leave."""
    found = list(_of_git(project))
    if project / "train.py" in found:
        yield from found
    else:
        yield from _of_ignore_files(project)


def _of_git(folder: Path) -> Iterator[Path]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, check=False)
    except FileNotFoundError:
        return
    for name in dict.fromkeys(done.stdout.split(b"\0")):
        path = folder / os.fsdecode(name)
        if path.is_dir() and not path.is_symlink() and path != folder:  # a checkout inside: git names only its folder
            yield from _of_git(path)
        elif name:
            yield path


def _of_ignore_files(project: Path) -> Iterator[Path]:
    from ray._private.runtime_env.packaging import _dir_travel

    found: list[Path] = []
    _dir_travel(
        project,
        [lambda path: path != project and (path.parent.is_symlink() or _is_never(path, project))],  # Ray follows links
        lambda path: found.append(path) if path.is_symlink() or path.is_file() else None,
        include_gitignore=True,
        logger=logging.getLogger(__name__),
    )
    yield from found


def _is_never(file: Path, project: Path, without: tuple[Path, ...] = ()) -> bool:
    """Whether something is never sent, whatever git says."""
    parts = file.relative_to(project).parts
    if parts[0] in NEVER_HERE or any(part in NEVER or part.startswith(".env.") for part in parts):
        return True
    folders = [project.joinpath(*parts[: depth + 1]) for depth in range(len(parts))]
    return any(
        folder in without or (folder / "pyvenv.cfg").exists() or (folder / "conda-meta").exists() for folder in folders
    )


def _leads_to_code(link: Path, project: Path, without: tuple[Path, ...]) -> bool:
    target, root = link.resolve(), project.resolve()
    if not target.is_relative_to(root) or not target.is_file():
        return False
    return not _is_never(target, root, without)
