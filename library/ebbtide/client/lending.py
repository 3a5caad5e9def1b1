"""Client methods for loans, recalls and the switches of lending."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from ebbtide.client.methods import ListMethod, RequestMethod
from ebbtide.client.requests import Pages, Request

if TYPE_CHECKING:
    from ebbtide.client.views import LoanView, RecallReceiptView, SafetyReportView, SwitchesView


class LendingMethods:
    @ListMethod
    def loans(self, *, state: str = "") -> Pages[LoanView]:
        return Pages("/v1/loans", query={"state": state})

    @RequestMethod
    def veto_loan(self, loan_id: str, *, reason: str) -> Request[LoanView]:
        """Reject a proposed loan. Its node is not proposed again for the pool's `veto_s`."""
        return Request("POST", f"/v1/loans/{quote(loan_id, safe='')}:veto", json={"reason": reason})

    @ListMethod
    def recalls(
        self, *, pool: str = "", since_s: float | None = None, until_s: float | None = None
    ) -> Pages[RecallReceiptView]:
        """Return the receipts of recalls, newest first.

        `since_s` and `until_s` are seconds since 1970 (UTC), between which the recalls were made.
        """
        times = {"since_s": since_s, "until_s": until_s}
        return Pages(
            "/v1/recalls", query={"pool": pool} | {name: repr(at) for name, at in times.items() if at is not None}
        )

    @RequestMethod
    def safety_report(self, pool: str, *, month: str = "") -> Request[SafetyReportView]:
        """Return what lending did to a pool in a month such as `2026-10`; empty means the current one."""
        return Request(
            "GET", f"/v1/pools/{quote(pool, safe='')}/safety-report", query={"month": month} if month else {}
        )

    @RequestMethod
    def pause_lending(self) -> Request[SwitchesView]:
        return Request("POST", "/v1/lending:pause")

    @RequestMethod
    def resume_lending(self) -> Request[SwitchesView]:
        return Request("POST", "/v1/lending:resume")

    @RequestMethod
    def recall_all(self) -> Request[SwitchesView]:
        return Request("POST", "/v1/lending:recall-all")
