"""Loans, and the switches that stop them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from api.sdk.calls import Calls

if TYPE_CHECKING:
    from api.answers.loan import LoanView, SwitchesView


class LendingCalls(Calls):
    def loans(self, *, state: str = "") -> list[LoanView]:
        return list(self._connection.items("/v1/loans", query={"state": state}))

    def pause_lending(self) -> SwitchesView:
        return self._connection.object("POST", "/v1/lending:pause")

    def resume_lending(self) -> SwitchesView:
        return self._connection.object("POST", "/v1/lending:resume")

    def recall_all(self) -> SwitchesView:
        return self._connection.object("POST", "/v1/lending:recall-all")
