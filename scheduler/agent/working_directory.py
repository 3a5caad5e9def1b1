"""Working directories of jobs on this machine.

<root>/<key>.lock        held while the directory is prepared or deleted
<root>/<key>/workdir/    the unpacked archive, and what the setup command made of it; shared, so ranks only read it
<root>/<key>/setup.log   output of the setup command
<root>/<key>/ready.json  written last: a directory without it is deleted and prepared again

The key is a digest of archive, setup command and user.
"""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import shutil
import tarfile
import threading
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

from scheduler.agent.folder_removal import delete_folder
from scheduler.domain.job_account import PermanentFault
from scheduler.domain.program import (
    ARCHIVE_BYTES_MAX,
    ARCHIVE_ENTRIES_MAX,
    UNPACKED_RATIO_MAX,
    find_entry_name_problem,
    find_link_problem,
)
from scheduler.executors.run_outcome import COMMAND_NOT_FOUND_CODES

LOG_LINES = 20
_LOCK_POLL_S = 0.05
_LOG_BYTES = 65_536
_HEADER_BYTES_MAX = 2**20
"""Longest header of an entry, such as its name. tarfile reads it into memory."""

Fetch = Callable[[Path], None]
"""Writes the archive to a file."""
RunSetup = Callable[[tuple[str, ...], Path, Path], int]
"""Runs a command in a folder as the job's user, appends its output to a file, and returns its exit code."""


class WorkingDirectoryError(Exception):
    """The working directory cannot be prepared. The message says why, and no part of it is left.

    `permanent_fault` is why another try cannot succeed, None if it may. A setup command may have failed for lack of a
    network.
    """

    def __init__(self, message: str, permanent_fault: PermanentFault | None = None) -> None:
        super().__init__(message)
        self.permanent_fault = permanent_fault


@dataclass(frozen=True, slots=True)
class UserIds:
    """User and group that own the files."""

    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class UnpackLimits:
    """Limits of an unpacked archive: bytes of all files, and number of entries."""

    bytes_max: int = UNPACKED_RATIO_MAX * ARCHIVE_BYTES_MAX
    entries_max: int = ARCHIVE_ENTRIES_MAX

    @classmethod
    def for_archives(cls, bytes_max: int | None) -> UnpackLimits:
        """Return the limits where archives may have `bytes_max` bytes. None: the default."""
        return cls() if bytes_max is None else cls(bytes_max=UNPACKED_RATIO_MAX * bytes_max)


@dataclass(frozen=True, slots=True)
class WorkingDirectory:
    """A prepared directory. `unpacked` names its top-level entries that came from the archive."""

    path: Path
    unpacked: tuple[str, ...]

    def copy_to(self, target: Path, user: UserIds | None = None) -> None:
        """Create the writable directory of one generation, which no other generation sees.

        Files of the archive are copied, because a hard link would share later writes. Top-level entries that the setup
        command added, such as `.venv`, are links to the prepared directory, because they are large and a virtual
        environment works at one path only.

        Raises:
            WorkingDirectoryError: the files cannot be written; `target` is not left.
        """
        part = target.with_name(f".{target.name}.part")
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(mode=0o700, parents=True)
            for source in self.path.iterdir():
                if source.name not in self.unpacked:
                    (part / source.name).symlink_to(source)
                elif source.is_dir() and not source.is_symlink():
                    shutil.copytree(source, part / source.name, symlinks=True)
                else:
                    shutil.copy2(source, part / source.name, follow_symlinks=False)
            _give_to(part, user)
            part.rename(target)
        except (OSError, shutil.Error) as error:
            shutil.rmtree(part, ignore_errors=True)
            raise WorkingDirectoryError(f"the working directory cannot be copied to {target}: {error}") from error


class WorkingDirectories:
    """The working directories below `root`, each prepared once. Several processes and threads may share `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    def prepare(
        self,
        digest: str,
        fetch: Fetch,
        *,
        run_setup: RunSetup,
        setup: tuple[str, ...] = (),
        user: UserIds | None = None,
        limits: UnpackLimits = UnpackLimits(),
        cancelled: threading.Event | None = None,
    ) -> WorkingDirectory:
        """Return the directory of an archive after its setup command. Waits while another thread prepares it.

        The setup command runs where the directory stays, because virtual environments contain their own path. Another
        user has another directory, because a setup command can write anything into it.

        Args:
            digest: of the archive, `sha256:<hex>`.
            fetch: called if the directory is not prepared yet.
            user: owner of the files; None: the agent's user.
            cancelled: ends a wait for another thread once it is set.

        Raises:
            WorkingDirectoryError: the archive is damaged, unsafe or too large, its setup command failed, or the
                preparation was cancelled.
        """
        folder = self._root / _key(digest, setup, user)
        self._root.mkdir(parents=True, exist_ok=True, mode=0o711)
        with _locked(folder, cancelled):
            if (ready := _read_ready(folder)) is not None:
                os.utime(folder / "ready.json")
                return ready
            shutil.rmtree(folder, ignore_errors=True)
            try:
                unpacked = _unpack(folder, digest, fetch, limits)
                _give_to(folder / "workdir", user)
                if setup:
                    _set_up(folder, setup, run_setup)
                return _write_ready(folder, unpacked)
            except OSError as error:
                raise WorkingDirectoryError(f"the working directory {digest} cannot be prepared: {error}") from error
            finally:
                if _read_ready(folder) is None:
                    shutil.rmtree(folder, ignore_errors=True)

    def delete_unused(self, before_s: float, *, in_use: Collection[Path] = ()) -> int:
        """Delete directories that were last prepared or asked for before this time, and return their number.

        `in_use`: directories of live generations, which stay.
        """
        deleted = 0
        for lock in self._root.glob("*.lock"):
            folder = lock.with_suffix("")
            ready = folder / "ready.json"
            if folder / "workdir" in in_use or not _is_older(ready, before_s):
                continue
            with _locked(folder):
                if _is_older(ready, before_s):
                    ready.unlink()
                    delete_folder(folder)
                    deleted += 1
        return deleted

    def find(self, digest: str, setup: tuple[str, ...] = (), user: UserIds | None = None) -> Path:
        """Return where the directory of an archive is, prepared or not."""
        return self._root / _key(digest, setup, user) / "workdir"


def _unpack(folder: Path, digest: str, fetch: Fetch, limits: UnpackLimits) -> tuple[str, ...]:
    """Fetch and unpack the archive, and return its top-level entries."""
    folder.mkdir(mode=0o711)
    archive, workdir = folder / "archive", folder / "workdir"
    fetch(archive)
    _check_digest(archive, digest)
    workdir.mkdir(mode=0o700)
    unpack_archive(archive, workdir, limits)
    archive.unlink()
    return tuple(sorted(entry.name for entry in workdir.iterdir()))


def _set_up(folder: Path, setup: tuple[str, ...], run_setup: RunSetup) -> None:
    """Run the setup command. Raises WorkingDirectoryError with its last lines if it fails."""
    log = folder / "setup.log"
    log.touch(mode=0o600)
    code = run_setup(setup, folder / "workdir", log)
    if code != 0:
        last = "\n".join(_read_last_lines(log)) or "it printed nothing"
        fault = PermanentFault.COMMAND_NOT_FOUND if code in COMMAND_NOT_FOUND_CODES else None
        raise WorkingDirectoryError(f"the setup command {setup[-1]!r:.200} exited with code {code}:\n{last}", fault)


def _write_ready(folder: Path, unpacked: tuple[str, ...]) -> WorkingDirectory:
    part = folder / "ready.part"
    part.write_text(json.dumps({"unpacked": unpacked}), encoding="utf-8")
    part.rename(folder / "ready.json")
    return WorkingDirectory(folder / "workdir", unpacked)


def unpack_archive(archive: Path, target: Path, limits: UnpackLimits) -> None:
    """Unpack a gzip-compressed tar file into the empty folder `target`. Nothing is written outside it.

    Accepts regular files, folders and symbolic links within the folder, each name once. tarfile's `data` filter checks
    every entry as well.

    Raises:
        WorkingDirectoryError: the archive is damaged, unsafe or exceeds a limit. Parts of it are left in `target`.
    """
    entries, size, names, links = 0, 0, set[str](), set[str]()
    try:
        with _BoundedGzip(archive) as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
            for entry in tar:
                name = entry.name.removeprefix("./")
                if name in ("", ".") and entry.isdir():
                    continue  # the folder itself, which tar lists first
                entries, size = entries + 1, size + entry.size
                problem = _find_entry_problem(entry, name, names, links)
                if problem is None and entries > limits.entries_max:
                    problem = f"it is one of more than {limits.entries_max} entries, the maximum"
                if problem is None and size > limits.bytes_max:
                    problem = f"the files have more than {limits.bytes_max} bytes, the maximum"
                if problem is not None:
                    raise _refuse_archive(f"the archive is refused at {name!r:.200}: {problem}")
                names.add(name)
                if entry.issym():
                    links.add(name)
                tar.extract(entry.replace(name=name, deep=False), target, filter="data")
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, UnicodeError) as error:
        raise _refuse_archive(f"the archive is damaged or no gzip-compressed tar file: {error}") from error


def _refuse_archive(problem: str) -> WorkingDirectoryError:
    """Return the error of an archive that arrived as it was sent, so that it will never be accepted."""
    return WorkingDirectoryError(problem, PermanentFault.ARCHIVE_REFUSED)


def _find_entry_problem(entry: tarfile.TarInfo, name: str, names: set[str], links: set[str]) -> str | None:
    """Return why an entry is refused, or None.

    `names` holds the names of all entries before it, `links` those of symbolic links.
    """
    if problem := find_entry_name_problem(name):
        return problem
    if entry.size < 0:
        return f"its size is {entry.size}"
    if not (entry.type in (tarfile.REGTYPE, tarfile.AREGTYPE) or entry.isdir() or entry.issym()):
        return "it is neither a file, a folder nor a symbolic link"
    parents = [name[:at] for at, character in enumerate(name) if character == "/"]
    if link := next((parent for parent in parents if parent in links), None):
        return f"it is below the symbolic link {link}"
    if name in names and not (entry.isdir() and name not in links):
        return "the archive contains the name twice"
    return find_link_problem(name, entry.linkname) if entry.issym() else None


class _BoundedGzip(gzip.GzipFile):
    """A stream that refuses large reads: tarfile reads files in small pieces, but a header at once."""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= _HEADER_BYTES_MAX:
            raise _refuse_archive(f"the archive is refused: a header of an entry has {size} bytes")
        return super().read(size)


def _check_digest(archive: Path, digest: str) -> None:
    with archive.open("rb") as file:
        actual = f"sha256:{file_digest(file, 'sha256').hexdigest()}"
    if actual != digest:
        size = archive.stat().st_size
        raise WorkingDirectoryError(
            f"the archive {digest} is truncated or altered: the {size} bytes received have the digest {actual}"
        )


def _key(digest: str, setup: tuple[str, ...], user: UserIds | None) -> str:
    text = json.dumps([digest, setup, None if user is None else user.uid])
    return sha256(text.encode()).hexdigest()[:32]


@contextmanager
def _locked(folder: Path, cancelled: threading.Event | None = None) -> Iterator[None]:
    """Hold the lock of a directory. The lock file stays: another thread may wait for it.

    Raises:
        WorkingDirectoryError: it was cancelled while another thread held the lock.
    """
    lock = os.open(folder.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    cancelled = threading.Event() if cancelled is None else cancelled
    try:
        while not _try_lock(lock):
            if cancelled.wait(_LOCK_POLL_S):
                raise WorkingDirectoryError("its working directory is not wanted any more")
        yield
    finally:
        os.close(lock)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_older(file: Path, before_s: float) -> bool:
    try:
        return file.stat().st_mtime < before_s
    except FileNotFoundError:
        return False


def _read_ready(folder: Path) -> WorkingDirectory | None:
    try:
        document: Any = json.loads((folder / "ready.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return WorkingDirectory(folder / "workdir", tuple(document["unpacked"]))


def _give_to(folder: Path, user: UserIds | None) -> None:
    """Make the user the owner of everything in the folder, without following links."""
    if user is None:
        return
    for place, folders, files in os.walk(folder):
        for name in ("", *folders, *files):
            os.chown(Path(place) / name, user.uid, user.gid, follow_symlinks=False)


def _read_last_lines(log: Path) -> list[str]:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_BYTES))
        return file.read().decode("utf-8", "replace").splitlines()[-LOG_LINES:]
