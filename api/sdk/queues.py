"""Queues: who pays for jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from api.connection import JsonObject
from api.sdk.calls import Calls


class QueueCalls(Calls):
    def queues(self) -> list[JsonObject]:
        """Declared queues and those that live jobs name, with what they use, borrow and wait for."""
        return list(self._connection.items("/v1/queues", query={}))

    def queue(self, name: str) -> JsonObject:
        return self._connection.object("GET", _queue(name))

    def create_queue(self, document: Mapping[str, Any]) -> JsonObject:
        return self._connection.object("POST", "/v1/queues", json=document)

    def change_queue(self, name: str, change: Mapping[str, Any]) -> JsonObject:
        """Change `guaranteed_gpus`, `limit_gpus` (None: no limit) or `weight`; what is left out stays."""
        return self._connection.object("PATCH", _queue(name), json=change)

    def delete_queue(self, name: str) -> JsonObject:
        return self._connection.object("DELETE", _queue(name))


def _queue(name: str) -> str:
    return f"/v1/queues/{quote(name, safe='')}"
