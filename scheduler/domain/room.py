"""Room: what is free on a node that training may put something new on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Room:
    node: str
    gpu: str
    lent: bool
    free: tuple[int, ...]

    def without(self, taken: tuple[int, ...]) -> Room:
        """The room once these GPUs are taken."""
        return Room(self.node, self.gpu, self.lent, tuple(index for index in self.free if index not in taken))
