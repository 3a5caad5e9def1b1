"""Server-sent events as a client reads them: message by message, over as many connections as it takes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import httpx

from api.connection import PAUSE_S_MAX, TRY_LATER, Connection, JsonObject, ProblemError, UnreachableError

ATTEMPTS_MAX = 10
"""So many connections in a row that bring nothing are the end: with their pauses, most of a minute."""


@dataclass(frozen=True, slots=True)
class Message:
    """`id` is where to go on from; `kind` is `message` unless the service says otherwise."""

    id: str
    kind: str
    data: JsonObject


def follow(connection: Connection, path: str, query: Mapping[str, str]) -> Iterator[Message]:
    """Messages until one of kind `end`, each once, whatever becomes of the connection.

    Raises:
        ProblemError: the service refused.
        UnreachableError: it did not answer for a while.
    """
    last_id, failures, said = "", 0, "the stream ends at once"
    while True:
        try:
            with connection.stream(path, query=query, last_id=last_id) as lines:
                for message in _messages(lines):
                    last_id, failures = message.id, 0
                    yield message
                    if message.kind == "end":
                        return
        except httpx.TransportError as broken:
            said = str(broken) or type(broken).__name__
        except ProblemError as problem:
            if problem.status not in TRY_LATER:
                raise
            said = str(problem)
        failures += 1
        if failures >= ATTEMPTS_MAX:
            raise UnreachableError(f"{connection.url} does not answer: {said}")
        connection.retries.sleep(min(connection.retries.pause_s * 2.0 ** (failures - 1), PAUSE_S_MAX))


def _messages(lines: Iterable[str]) -> Iterator[Message]:
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(": ")
        if line and name:
            fields[name] = value
        elif not line:
            if "data" in fields:
                yield Message(fields.get("id", ""), fields.get("event", "message"), json.loads(fields["data"]))
            fields = {}
