"""Client methods for the archives of working directories."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from ebbtide.client.methods import RequestMethod
from ebbtide.client.requests import Request

if TYPE_CHECKING:
    from ebbtide.client.views import ArchiveView

CHUNK_BYTES = 2**18
_NOT_FOUND = 404


class ArchiveMethods:
    @RequestMethod
    def has_archive(self, digest: str) -> Request[bool]:
        """Return whether the service stores the archive. A stored one is kept for another retention period."""
        return Request("HEAD", _archive_path(digest), read=lambda _: True, results={_NOT_FOUND: False})

    @RequestMethod
    def upload_archive(
        self, digest: str, file: Path, *, on_sent: Callable[[int], None] = lambda sent_bytes: None
    ) -> Request[ArchiveView]:
        """Upload a gzip-compressed tar archive, so that a job document can name `digest` in `workdir.archive`.

        `on_sent` is called with the number of bytes sent so far; after a retry, the count starts again. `AsyncClient`
        calls it in a worker thread, which reads the file.
        """

        def read() -> Iterator[bytes]:
            sent = 0
            with file.open("rb") as opened:
                while chunk := opened.read(CHUNK_BYTES):
                    yield chunk
                    sent += len(chunk)
                    on_sent(sent)

        headers = {"Content-Type": "application/gzip", "Content-Length": str(file.stat().st_size)}
        return Request("PUT", _archive_path(digest), open_body=read, headers=headers)


def _archive_path(digest: str) -> str:
    return f"/v1/archives/{quote(digest, safe=':')}"
