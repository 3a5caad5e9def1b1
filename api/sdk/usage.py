"""Usage: who held how many GPU-seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from api.answers.usage import UsageReportView
from api.sdk.calls import Calls


class UsageCalls(Calls):
    def usage(self, *, since: str = "", until: str = "", by: Sequence[str] = ("queue",)) -> UsageReportView:
        """GPU-seconds by any of day, hour, queue, owner and gpu; `since` and `until` are seconds since 1970 or ISO
        dates and times, else the last 30 days."""
        query = {"from": since, "to": until, "by": ",".join(by)}
        given = {name: value for name, value in query.items() if value}
        return cast(UsageReportView, self._connection.object("GET", "/v1/usage", query=given))
