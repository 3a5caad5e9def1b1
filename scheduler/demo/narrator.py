"""The narrator: prints what the service's event log tells, as it happens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console

from api.client import Client

if TYPE_CHECKING:
    from api.answers.record import EventView

_COLOURS = {
    "NodeLent": "cyan",
    "LoanActive": "cyan",
    "JobStarted": "green",
    "JobGrown": "bold green",
    "NodeRecalled": "bold yellow",
    "NodeRecallCancelled": "yellow",
    "JobShrunk": "yellow",
    "JobMoved": "yellow",
    "NodeReturned": "bold cyan",
    "JobPreempted": "red",
    "JobLostWork": "bold red",
    "Breach": "bold red",
    "DecisionDropped": "bold red",
}
_WORDS = {
    "NodeLent": "lent",
    "LoanActive": "serves training",
    "JobStarted": "started",
    "JobGrown": "grown",
    "NodeRecalled": "recalled",
    "NodeRecallCancelled": "recall cancelled",
    "JobShrunk": "shrunk",
    "JobMoved": "moved",
    "NodeReturned": "returned",
    "JobPreempted": "preempted",
    "JobLostWork": "lost work",
    "Breach": "breach",
    "DecisionDropped": "decision dropped",
}


class Narrator:
    """Follows the event log by number, so that nothing is told twice."""

    def __init__(self, console: Console, client: Client, *, started_at_s: float) -> None:
        self.events: list[EventView] = []
        self._console = console
        self._client = client
        self._started_at_s = started_at_s

    def tell_news(self) -> None:
        after = self.events[-1]["number"] if self.events else 0
        news = list(self._client.events(after=after))
        self.events.extend(news)
        self._print(news)

    def _print(self, news: Iterable[EventView]) -> None:
        for event in news:
            code, message = event["code"], event["message"]
            if code == "JobState" and message.partition("->")[2].split(":")[0].strip() in ("succeeded", "failed"):
                self._line(event, "finished", "bold green", message)
            elif code in _WORDS:
                self._line(event, _WORDS[code], _COLOURS[code], message)

    def _line(self, event: EventView, word: str, colour: str, message: str) -> None:
        at_s = max(0.0, event["at_s"] - self._started_at_s)
        self._console.print(
            f"[dim]{at_s:5.0f} s[/dim]  [{colour}]{word:<16}[/{colour}] {event['subject']:<22} {message}",
            highlight=False,
            soft_wrap=True,
        )
