"""Calls: what the client's methods of one noun share, the connection that they are sent over."""

from __future__ import annotations

from urllib.parse import quote

from api.connection import IF_MATCH, Connection


class Calls:
    """Base of the groups of methods that make up `api.client.Client`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection


def job_path(job_id: str) -> str:
    return f"/v1/jobs/{quote(job_id, safe='')}"


def matching(if_match: str) -> dict[str, str]:
    """The header that has a change made only where this is still the ETag of what it changes; else a problem of 412."""
    return {IF_MATCH: if_match} if if_match else {}
