"""Room: what is free on a node that training may put something new on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Room:
    node: str
    gpu: str
    lent: bool
    free: tuple[int, ...]
