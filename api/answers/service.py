"""How the service itself fares, as answers."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict


class HealthView(TypedDict):
    status: Literal["ok"]
    version: str


class ReadyView(TypedDict):
    """`inbox_commands`: how many commands wait for the next tick."""

    status: Literal["ok"]
    inbox_commands: int
