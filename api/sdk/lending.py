"""Loans, and the switches that stop them."""

from __future__ import annotations

from api.connection import JsonObject
from api.sdk.calls import Calls


class LendingCalls(Calls):
    def loans(self, *, state: str = "") -> list[JsonObject]:
        return list(self._connection.items("/v1/loans", query={"state": state}))

    def pause_lending(self) -> JsonObject:
        return self._connection.object("POST", "/v1/lending:pause")

    def resume_lending(self) -> JsonObject:
        return self._connection.object("POST", "/v1/lending:resume")

    def recall_all(self) -> JsonObject:
        return self._connection.object("POST", "/v1/lending:recall-all")
