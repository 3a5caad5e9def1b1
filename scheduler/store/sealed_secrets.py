"""Encrypted secrets of queues, and the protocol of their stores. A store never holds a key that opens them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from scheduler.store.api_protocol import AuditEntry


@dataclass(frozen=True, slots=True)
class SealedSecret:
    """A secret of a queue, encrypted. Binary fields are base64.

    Args:
        version: number of the value, which increases with each change.
        master_key: id of the master key that wraps the data key.
        wrapped_key: data key, encrypted with the master key.
        sealed_value: value, encrypted with the data key.
    """

    queue: str
    name: str
    version: int
    master_key: str
    wrapped_key: str
    sealed_value: str
    created_at_s: float
    changed_at_s: float
    changed_by: str


class SecretStore(Protocol):
    """Encrypted secrets by queue and name. Every method may raise UnavailableError.

    `audit` is written in the transaction of the change.
    """

    def put(self, secret: SealedSecret, audit: AuditEntry) -> SealedSecret:
        """Add or replace a secret. Return it with its version, and with the creation time of a replaced one."""

    def find(self, queue: str, name: str) -> SealedSecret | None: ...

    def list_secrets(self, queue: str) -> tuple[SealedSecret, ...]:
        """Return the secrets of a queue, or of all queues if it is empty, by queue and name."""

    def rewrap(self, secret: SealedSecret, audit: AuditEntry | None = None) -> bool:
        """Replace the wrapped key. Return False if the value was changed or deleted since it was read."""

    def remove(self, queue: str, name: str, audit: AuditEntry) -> bool:
        """Delete a secret. Return False, and write nothing, if it does not exist."""
