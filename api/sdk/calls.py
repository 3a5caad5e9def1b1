"""Calls: what the client's methods of one noun share, the connection that they are sent over."""

from __future__ import annotations

from urllib.parse import quote

from api.connection import Connection


class Calls:
    """Base of the groups of methods that make up `api.client.Client`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection


def job_path(job_id: str) -> str:
    return f"/v1/jobs/{quote(job_id, safe='')}"
