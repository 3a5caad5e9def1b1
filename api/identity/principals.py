"""Principal: who asks, and what that person or program may do.

API tokens: made once, shown once, and known by their digest from then on.

A secret has 256 random bits, so nobody finds it by trying, and a digest that is slow or salted would protect nothing:
those are for passwords, which people choose. SHA-256 makes looking one up a single indexed read.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from hashlib import sha256

from scheduler.domain.suggestions import suggest
from scheduler.store.api_protocol import ApiToken


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


_ROLE_BY_LABEL = {role.label: role for role in Role}
_QUEUE_NAME = re.compile(r"[^:\s\x00-\x1f]{1,63}")


@dataclass(frozen=True, slots=True)
class Grant:
    """A role on one queue, or on all of them and on the fleet where `queue` is empty."""

    role: Role
    queue: str = ""

    def __str__(self) -> str:
        return f"{self.role.label}:{self.queue}" if self.queue else self.role.label

    @classmethod
    def parse(cls, text: str) -> Grant:
        """The grant that reads as `text`, such as viewer or submitter:research.

        Raises:
            ValueError: it is none; the message says what is allowed.
        """
        name, colon, queue = text.partition(":")
        role = _ROLE_BY_LABEL.get(name)
        if role is None:
            raise ValueError(
                f"one of {', '.join(_ROLE_BY_LABEL)}, each perhaps with :QUEUE{suggest(name, _ROLE_BY_LABEL)}"
            )
        if colon and (role is Role.ADMIN or not _QUEUE_NAME.fullmatch(queue)):
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

    def has_role(self, role: Role, queue: str = "") -> bool:
        """Whether it has `role` on `queue`; on everything where `queue` is empty."""
        return any(grant.role >= role and grant.queue in ("", queue) for grant in self.grants)

    @property
    def readable_queues(self) -> frozenset[str] | None:
        """The queues whose jobs it may read; None for all."""
        return None if self.has_role(Role.VIEWER) else frozenset(grant.queue for grant in self.grants)

    def has_role_anywhere(self, role: Role) -> bool:
        """Whether it has `role` on any queue at all."""
        return any(grant.role >= role for grant in self.grants)


ANONYMOUS = Principal("anybody", (Grant(Role.ADMIN),))
"""Whoever asks where nobody has to say who asks."""
WORKER = Principal("worker", (Grant(Role.VIEWER),))
"""A worker or agent on the one route that takes its token, which checks it against the job."""


API_TOKEN_PREFIX = "ebk_"
_SECRET_BYTES = 32
_PREFIX_LENGTH = 10


def generate_token(
    name: str, grants: Iterable[Grant], *, created_by: str, now_s: float, expires_at_s: float | None
) -> tuple[ApiToken, str]:
    """A token to keep, and its secret, which is in no other place."""
    secret = API_TOKEN_PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
    token = ApiToken(
        id=f"tok-{secrets.token_hex(6)}",
        name=name,
        prefix=secret[:_PREFIX_LENGTH],
        digest=token_digest(secret),
        grants=tuple(map(str, grants)),
        created_at_s=now_s,
        created_by=created_by,
        expires_at_s=expires_at_s,
    )
    return token, secret


def token_digest(secret: str) -> str:
    return sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def token_principal(token: ApiToken) -> Principal:
    return Principal(token.name, tuple(map(Grant.parse, token.grants)), token.id)
