"""Principal: who asks, and what that person or program may do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Role(IntEnum):
    """What may be done, each role including those before it.

    A viewer reads; a submitter also hands in jobs and changes those of its own; a queue-admin changes every job of the
    queue, and the queue; an admin everything: pools, nodes, lending, tokens.
    """

    VIEWER = 1
    SUBMITTER = 2
    QUEUE_ADMIN = 3
    ADMIN = 4

    @property
    def label(self) -> str:
        return self.name.lower().replace("_", "-")


@dataclass(frozen=True, slots=True)
class Grant:
    """A role on one queue, or on all of them and on the fleet where `queue` is empty."""

    role: Role
    queue: str = ""

    def __str__(self) -> str:
        return f"{self.role.label}:{self.queue}" if self.queue else self.role.label


@dataclass(frozen=True, slots=True)
class Principal:
    """`name` is what jobs, commands and the audit log remember."""

    name: str
    grants: tuple[Grant, ...]

    def may(self, role: Role, queue: str = "") -> bool:
        """Whether it has `role` on `queue`; on everything where `queue` is empty."""
        return any(grant.role >= role and grant.queue in ("", queue) for grant in self.grants)

    def may_somewhere(self, role: Role) -> bool:
        """Whether it has `role` on any queue at all."""
        return any(grant.role >= role for grant in self.grants)


ANYBODY = Principal("anybody", (Grant(Role.ADMIN),))
"""Whoever asks where nobody has to say who asks."""
