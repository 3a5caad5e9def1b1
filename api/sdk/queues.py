"""Queues: who pays for jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from api.sdk.calls import Calls, matching

if TYPE_CHECKING:
    from api.answers.queue import QueueView


class QueueCalls(Calls):
    def queues(self) -> list[QueueView]:
        """Declared queues and those that live jobs name, with what they use, borrow and wait for."""
        return list(self._connection.items("/v1/queues", query={}))

    def queue(self, name: str) -> QueueView:
        return self._connection.object("GET", _queue(name))

    def create_queue(self, document: Mapping[str, Any]) -> QueueView:
        return self._connection.object("POST", "/v1/queues", json=document)

    def change_queue(self, name: str, change: Mapping[str, Any], *, if_match: str = "") -> QueueView:
        """Change `guaranteed_gpus`, `limit_gpus`, `user_limit_gpus`, `user_jobs_max` (None: no limit) or `weight`; what
        is left out stays."""
        return self._connection.object("PATCH", _queue(name), json=change, headers=matching(if_match))

    def delete_queue(self, name: str, *, if_match: str = "") -> QueueView:
        return self._connection.object("DELETE", _queue(name), headers=matching(if_match))


def _queue(name: str) -> str:
    return f"/v1/queues/{quote(name, safe='')}"
