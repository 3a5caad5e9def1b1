"""Principal: who asks, and what that person or program may do."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

from scheduler.domain.spelling import meant


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


_BY_LABEL = {role.label: role for role in Role}
_QUEUE = re.compile(r"[^:\s\x00-\x1f]{1,63}")


@dataclass(frozen=True, slots=True)
class Grant:
    """A role on one queue, or on all of them and on the fleet where `queue` is empty."""

    role: Role
    queue: str = ""

    def __str__(self) -> str:
        return f"{self.role.label}:{self.queue}" if self.queue else self.role.label

    @classmethod
    def of(cls, text: str) -> Grant:
        """The grant that reads as `text`, such as viewer or submitter:research.

        Raises:
            ValueError: it is none; the message says what is allowed.
        """
        name, colon, queue = text.partition(":")
        role = _BY_LABEL.get(name)
        if role is None:
            raise ValueError(f"one of {', '.join(_BY_LABEL)}, each perhaps with :QUEUE{meant(name, _BY_LABEL)}")
        if colon and (role is Role.ADMIN or not _QUEUE.fullmatch(queue)):
            raise ValueError("viewer, submitter or queue-admin with :QUEUE, the name of a queue; admin has none")
        return cls(role, queue)


@dataclass(frozen=True, slots=True)
class Principal:
    """`name` is what jobs, commands and the audit log remember. `token_id` is empty without an API token."""

    name: str
    grants: tuple[Grant, ...]
    token_id: str = ""

    def __str__(self) -> str:
        return f"{self.name} with {', '.join(map(str, self.grants)) or 'no role'}"

    def may(self, role: Role, queue: str = "") -> bool:
        """Whether it has `role` on `queue`; on everything where `queue` is empty."""
        return any(grant.role >= role and grant.queue in ("", queue) for grant in self.grants)

    @property
    def queues(self) -> frozenset[str] | None:
        """The queues whose jobs it may read; None for all."""
        return None if self.may(Role.VIEWER) else frozenset(grant.queue for grant in self.grants)

    def may_somewhere(self, role: Role) -> bool:
        """Whether it has `role` on any queue at all."""
        return any(grant.role >= role for grant in self.grants)


ANYBODY = Principal("anybody", (Grant(Role.ADMIN),))
"""Whoever asks where nobody has to say who asks."""
REPORTER = Principal("worker", (Grant(Role.VIEWER),))
"""A worker or agent on the one route that takes its token, which checks it against the job."""
