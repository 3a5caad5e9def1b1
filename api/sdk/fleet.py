"""Pools and nodes, and the demand of inference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from api.connection import JsonObject
from api.sdk.calls import Calls


class FleetCalls(Calls):
    def pools(self) -> list[JsonObject]:
        return list(self._connection.items("/v1/pools", query={}))

    def pool(self, name: str) -> JsonObject:
        return self._connection.object("GET", _pool(name))

    def create_pool(self, document: Mapping[str, Any]) -> JsonObject:
        return self._connection.object("POST", "/v1/pools", json=document)

    def delete_pool(self, name: str) -> JsonObject:
        return self._connection.object("DELETE", _pool(name))

    def nodes(self, *, pool: str = "") -> list[JsonObject]:
        return list(self._connection.items("/v1/nodes", query={"pool": pool}))

    def node(self, name: str) -> JsonObject:
        return self._connection.object("GET", _node(name))

    def add_node(self, document: Mapping[str, Any]) -> JsonObject:
        return self._connection.object("POST", "/v1/nodes", json=document)

    def delete_node(self, name: str) -> JsonObject:
        return self._connection.object("DELETE", _node(name))

    def cordon(self, node: str) -> JsonObject:
        return self._connection.object("POST", f"{_node(node)}:cordon")

    def drain(self, node: str) -> JsonObject:
        return self._connection.object("POST", f"{_node(node)}:drain")

    def uncordon(self, node: str) -> JsonObject:
        return self._connection.object("POST", f"{_node(node)}:uncordon")

    def demand(self, pool: str) -> JsonObject:
        """The pool's latest demand and the recorded readings."""
        return self._connection.object("GET", f"{_pool(pool)}/demand")

    def report_demand(self, pool: str, *, gpus: float, at_s: float | None = None) -> JsonObject:
        """Say how many GPUs the pool's inference needs from `at_s` on (seconds since 1970, UTC; None: from now on)."""
        report = {"gpus": gpus} if at_s is None else {"gpus": gpus, "at": at_s}
        return self._connection.object("POST", f"{_pool(pool)}/demand", json=report)

    def forecast(self, pool: str) -> JsonObject:
        return self._connection.object("GET", f"{_pool(pool)}/forecast")


def _pool(name: str) -> str:
    return f"/v1/pools/{quote(name, safe='')}"


def _node(name: str) -> str:
    return f"/v1/nodes/{quote(name, safe='')}"
