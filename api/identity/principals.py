"""Principals with their roles and grants, and the API tokens that stand for them.

A token's secret has 256 random bits, so a plain SHA-256 digest protects it: slow or salted hashes are for passwords
that people choose. The digest makes a lookup one indexed read.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import sha256

from scheduler.domain.owner_ids import LOCAL_OWNER_ID, LOCAL_OWNER_NAME, get_idempotency_scope
from scheduler.domain.suggestions import suggest
from scheduler.store.credentials import ApiToken, ServiceAccount


class Role(IntEnum):
    """Permissions of a principal. Each role includes the ones before it.

    A viewer reads. A submitter also submits jobs and changes its own. A queue-admin changes all jobs of a queue and the
    queue. An admin changes everything: pools, nodes, lending, tokens.
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
    """A role on one queue. If `queue` is empty, the role holds on all queues and on the fleet."""

    role: Role
    queue: str = ""

    def __str__(self) -> str:
        return f"{self.role.label}:{self.queue}" if self.queue else self.role.label

    @classmethod
    def parse(cls, text: str) -> Grant:
        """Return the grant that a text such as "viewer" or "submitter:research" describes.

        Raises:
            ValueError: the text is not a grant; the message names the accepted values.
        """
        name, colon, queue = text.partition(":")
        role = _ROLE_BY_LABEL.get(name)
        if role is None:
            roles = ", ".join(_ROLE_BY_LABEL)
            raise ValueError(f"one of {roles}, or one with :QUEUE for a single queue{suggest(name, _ROLE_BY_LABEL)}")
        if colon and (role is Role.ADMIN or not _QUEUE_NAME.fullmatch(queue)):
            raise ValueError("a queue name after viewer:, submitter: or queue-admin:; admin takes none")
        return cls(role, queue)


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller of a request.

    Args:
        name: display name in jobs, commands and the audit log. Several principals may have it.
        subject: stable id that no other principal has. Ownership is compared by it alone.
        token_id: API token of the request. Empty without one.
    """

    name: str
    grants: tuple[Grant, ...]
    token_id: str = ""
    subject: str = field(kw_only=True)

    def __str__(self) -> str:
        return f"{self.name} with {', '.join(map(str, self.grants)) or 'no role'}"

    def has_role(self, role: Role, queue: str = "") -> bool:
        """Return whether it has `role` on `queue`, or on all queues if `queue` is empty."""
        return any(grant.role >= role and grant.queue in ("", queue) for grant in self.grants)

    @property
    def readable_queues(self) -> frozenset[str] | None:
        """The queues whose jobs it may read; None means all."""
        return None if self.has_role(Role.VIEWER) else frozenset(grant.queue for grant in self.grants)

    @property
    def idempotency_scope(self) -> str:
        return get_idempotency_scope(self.subject)

    def owns(self, owner_key: str) -> bool:
        """Return whether it is the owner with this id. An empty id is that of no owner."""
        return bool(owner_key) and owner_key == self.subject

    def has_role_anywhere(self, role: Role) -> bool:
        """Return whether it has `role` on at least one queue."""
        return any(grant.role >= role for grant in self.grants)


ANONYMOUS = Principal(LOCAL_OWNER_NAME, (Grant(Role.ADMIN),), subject=LOCAL_OWNER_ID)
"""Every caller while authentication is off."""
WORKER = Principal("worker", (Grant(Role.VIEWER),), subject="worker")
"""A worker or agent on a route that takes its token. The endpoint checks the token against the job."""


API_TOKEN_PREFIX = "ebk_"
_SECRET_BYTES = 32
_PREFIX_LENGTH = 10


def generate_token(
    name: str,
    grants: Iterable[Grant],
    *,
    created_by: str,
    now_s: float,
    expires_at_s: float | None,
    account: ServiceAccount | None = None,
) -> tuple[ApiToken, str]:
    """Return a new token to store and its secret, which is stored nowhere."""
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
        account_id="" if account is None else account.id,
        account=account,
    )
    return token, secret


def generate_account_id() -> str:
    return f"sa-{secrets.token_hex(6)}"


def token_digest(secret: str) -> str:
    return sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def token_principal(token: ApiToken) -> Principal:
    grants = tuple(map(Grant.parse, token.effective_grants))
    return Principal(token.name, grants, token.id, subject=token.owner_id)
