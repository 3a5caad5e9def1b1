"""Packing of a working directory: a folder becomes one archive whose digest depends on its content alone.

The archive is a gzip-compressed tar file with sorted names, and without owners and times. It contains regular files,
folders and symbolic links that stay in the folder.
"""

from __future__ import annotations

import gzip
import os
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path

from pathspec import GitIgnoreSpec

from cli.exit_codes import InputError
from scheduler.domain.program import (
    ARCHIVE_BYTES_MAX,
    ARCHIVE_ENTRIES_MAX,
    UNPACKED_RATIO_MAX,
    find_entry_name_problem,
    find_link_problem,
)

IGNORE_FILE = ".ebbtideignore"
DEFAULT_PATTERNS = (".git", "__pycache__", ".venv", "node_modules")
ENTRY_TIME_S = 315_619_200
"""Time of every entry, 1980-01-02: zip files, and so Python wheels that a setup command builds, have no earlier one."""
_REMEDY = f"Exclude it in {IGNORE_FILE}"


@dataclass(frozen=True, slots=True)
class PackedDirectory:
    """A packed working directory: its archive with digest and size in bytes, and its number of entries."""

    file: Path
    digest: str
    bytes: int
    entries: int


def pack_directory(folder: Path, target: Path, *, bytes_max: int = ARCHIVE_BYTES_MAX) -> PackedDirectory:
    """Pack `folder` into the file `target`. Two folders with the same content give the same digest.

    Patterns in `.ebbtideignore`, in the syntax of .gitignore, exclude files; DEFAULT_PATTERNS come first.

    Args:
        bytes_max: limit of the archive in bytes. The files may have UNPACKED_RATIO_MAX times as many.

    Raises:
        InputError: the folder cannot be read, exceeds a limit, or has an entry that cannot be packed.
    """
    if not folder.is_dir():
        raise InputError(f"--workdir: {folder} is not a folder. Name the folder with your code.")
    unpacked, entries = 0, 0
    try:
        with (
            target.open("wb") as raw,
            gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as tar,
        ):
            for name, path in _list_entries(folder, _read_patterns(folder)):
                entry = _describe_entry(name, path)
                unpacked, entries = unpacked + entry.size, entries + 1
                _check_limits(folder, name, unpacked=unpacked, entries=entries, packed=raw.tell(), bytes_max=bytes_max)
                _add_entry(tar, entry, path)
    except OSError as error:
        raise InputError(f"--workdir: {error.filename or folder}: {error.strerror}") from error
    size = target.stat().st_size
    _check_limits(folder, "", unpacked=unpacked, entries=entries, packed=size, bytes_max=bytes_max)
    with target.open("rb") as file:
        digest = file_digest(file, "sha256").hexdigest()
    return PackedDirectory(target, f"sha256:{digest}", size, entries)


def _read_patterns(folder: Path) -> GitIgnoreSpec:
    file = folder / IGNORE_FILE
    try:
        own = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        return GitIgnoreSpec.from_lines([*DEFAULT_PATTERNS, *own])
    except ValueError as error:  # includes UnicodeDecodeError
        raise InputError(f"--workdir: {file}: {error}. Write patterns as in .gitignore.") from error


def _list_entries(folder: Path, ignored: GitIgnoreSpec, prefix: str = "") -> Iterator[tuple[str, Path]]:
    """Yield name and path of each entry that is not ignored, folders before their content, in the order of names."""
    for path in sorted(folder.iterdir(), key=lambda path: os.fsencode(path.name)):
        name = prefix + path.name
        is_folder = path.is_dir() and not path.is_symlink()
        if ignored.match_file(f"{name}/" if is_folder else name):
            continue
        yield name, path
        if is_folder:
            yield from _list_entries(path, ignored, f"{name}/")


def _describe_entry(name: str, path: Path) -> tarfile.TarInfo:
    """Return the entry without owner and time.

    Raises:
        InputError: it is neither a file, a folder nor a link that stays in the working directory.
    """
    entry, status = tarfile.TarInfo(name), path.lstat()
    entry.mtime = ENTRY_TIME_S
    problem = find_entry_name_problem(name)
    if stat.S_ISREG(status.st_mode):
        entry.size, entry.mode = status.st_size, 0o755 if status.st_mode & stat.S_IXUSR else 0o644
    elif stat.S_ISDIR(status.st_mode):
        entry.type, entry.mode = tarfile.DIRTYPE, 0o755
    elif stat.S_ISLNK(status.st_mode):
        entry.type, entry.mode, entry.linkname = tarfile.SYMTYPE, 0o777, str(path.readlink())
        problem = problem or find_link_problem(name, entry.linkname)
    else:
        problem = problem or "it is neither a file, a folder nor a symbolic link"
    if problem:
        raise InputError(f"--workdir: {path}: {problem}. {_REMEDY}.")
    return entry


def _add_entry(tar: tarfile.TarFile, entry: tarfile.TarInfo, path: Path) -> None:
    if not entry.isreg():
        tar.addfile(entry)
        return
    with path.open("rb") as file:
        try:
            tar.addfile(entry, file)
        except OSError as error:
            if error.errno is not None:
                raise
            raise InputError(f"--workdir: {path} became shorter while it was read. Submit again.") from None


def _check_limits(folder: Path, name: str, *, unpacked: int, entries: int, packed: int, bytes_max: int) -> None:
    remedy = f"Exclude data and results in {folder / IGNORE_FILE}, or pass an absolute path to them"
    where = f" at {name}" if name else ""
    if entries > ARCHIVE_ENTRIES_MAX:
        raise InputError(f"--workdir: more than {ARCHIVE_ENTRIES_MAX} files{where}. {remedy}.")
    if unpacked > UNPACKED_RATIO_MAX * bytes_max:
        raise InputError(f"--workdir: more than {UNPACKED_RATIO_MAX * bytes_max} bytes of files{where}. {remedy}.")
    if packed > bytes_max:
        raise InputError(f"--workdir: the archive has more than {bytes_max} bytes{where}. {remedy}.")
