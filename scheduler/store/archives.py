"""Archives of working directories, by the SHA-256 digest of their bytes.

An archive is one file. Uploads are written beside it and renamed, so a reader sees a complete archive or none. The time
of a file is the last time that it was used: at its upload, at a submission that names it, and at each round of
retention while a live job names it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, Protocol

from scheduler.domain.program import find_digest_problem

UPLOAD_LIFETIME_S = 86_400.0
"""Age after which the file of an upload belongs to a process that was killed."""
_UPLOAD_PREFIX = "upload-"


class DigestMismatchError(ValueError):
    """The uploaded bytes have another digest than announced."""

    def __init__(self, actual: str) -> None:
        super().__init__(actual)
        self.actual = actual


class ArchiveUpload(Protocol):
    """An upload in progress. Its block discards it unless `complete` was called."""

    def write(self, data: bytes) -> None:
        """Append bytes. Raises OSError if they cannot be stored."""

    def complete(self) -> bool:
        """Store the archive durably. Return False if it was stored before.

        Raises:
            DigestMismatchError: the bytes are not those of the announced digest.
            OSError: they cannot be stored.
        """


class ArchiveStore(Protocol):
    """Every method takes a valid digest."""

    def find(self, digest: str) -> Path | None:
        """Return the file of an archive, or None."""

    def mark_used(self, digest: str, now_s: float) -> bool:
        """Keep the archive for another retention period from now on. Return whether it exists."""

    def upload(self, digest: str) -> AbstractContextManager[ArchiveUpload]:
        """Return the block of an upload. The file appears only with `ArchiveUpload.complete`.

        Entering the block raises OSError if the folder cannot be written.
        """

    def delete_unused(self, live: Collection[str], *, now_s: float, retention_s: float) -> int:
        """Mark `live` archives as used, delete those unused for `retention_s`, and return their number."""


class ArchiveFolder:
    """An ArchiveStore in a folder, which several processes can share. Created at the first upload."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def find(self, digest: str) -> Path | None:
        file = self._file(digest)
        return file if file.is_file() else None

    def mark_used(self, digest: str, now_s: float) -> bool:
        file = self._file(digest)
        with suppress(OSError):  # missing, or on a read-only disk, where retention deletes nothing either
            os.utime(file, (now_s, now_s))
        return file.is_file()

    @contextmanager
    def upload(self, digest: str) -> Iterator[ArchiveUpload]:
        target = self._file(digest)
        self._path.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, name = tempfile.mkstemp(prefix=_UPLOAD_PREFIX, dir=self._path)  # mkstemp creates with mode 0600
        temporary, file = Path(name), os.fdopen(handle, "wb")
        try:
            yield _FileUpload(target, temporary, file)
        finally:
            with suppress(OSError):  # closing writes what is buffered, which fails on a full disk
                file.close()
            temporary.unlink(missing_ok=True)

    def delete_unused(self, live: Collection[str], *, now_s: float, retention_s: float) -> int:
        for digest in live:
            self.mark_used(digest, now_s)
        deleted = 0
        for file, used_at_s in self._list_files():
            is_upload = file.name.startswith(_UPLOAD_PREFIX)
            if used_at_s >= now_s - (UPLOAD_LIFETIME_S if is_upload else retention_s):
                continue
            with suppress(OSError):  # the next round tries again
                file.unlink()
                deleted += not is_upload
        return deleted

    def _list_files(self) -> Iterator[tuple[Path, float]]:
        for file in self._path.glob("*"):
            try:
                yield file, file.stat().st_mtime
            except FileNotFoundError:
                continue  # another process has renamed or deleted it

    def _file(self, digest: str) -> Path:
        assert find_digest_problem(digest) is None, "a digest is checked before it names a file"
        return self._path / f"{digest.removeprefix('sha256:')}.tar.gz"


class _FileUpload:
    def __init__(self, target: Path, temporary: Path, file: BinaryIO) -> None:
        self._target = target
        self._temporary = temporary
        self._file = file
        self._hash = sha256()

    def write(self, data: bytes) -> None:
        self._hash.update(data)
        self._file.write(data)

    def complete(self) -> bool:
        digest = self._hash.hexdigest()
        if not self._target.name.startswith(digest):
            raise DigestMismatchError(f"sha256:{digest}")
        self._file.flush()
        os.fsync(self._file.fileno())
        existed = self._target.exists()
        self._temporary.replace(self._target)
        return not existed
