"""API tokens and the service accounts that they may belong to. Times are Unix seconds."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.domain.owner_ids import build_account_owner_id, build_token_owner_id


@dataclass(frozen=True, slots=True)
class ServiceAccount:
    """A caller that is no person. It stays the same caller while its tokens are replaced.

    Args:
        id: never used again, unlike `name`, which another account may have after a deletion.
        grants: texts such as "submitter:research". They apply to all its tokens at once.
        disabled_at_s: time since which its tokens are rejected. None: they are accepted.
    """

    id: str
    name: str
    grants: tuple[str, ...]
    created_at_s: float
    created_by: str
    expires_at_s: float | None = None
    disabled_at_s: float | None = None

    @property
    def owner_id(self) -> str:
        return build_account_owner_id(self.id)

    def has_expired(self, now_s: float) -> bool:
        return self.expires_at_s is not None and now_s >= self.expires_at_s


@dataclass(frozen=True, slots=True)
class ApiToken:
    """An API token without its secret.

    Args:
        prefix: the first characters of the secret, by which its owner recognizes it.
        digest: SHA-256 of the secret in hexadecimal.
        grants: texts such as "submitter:research".
        stored_owner_id: id of the caller, for tokens from before callers had ids. Empty: it follows from the token.
        account_id: service account that the token belongs to. Empty: none.
        account: that account as it is now. None: there is none, or it was deleted.
    """

    id: str
    name: str
    prefix: str
    digest: str
    grants: tuple[str, ...]
    created_at_s: float
    created_by: str
    expires_at_s: float | None = None
    last_used_at_s: float | None = None
    revoked_at_s: float | None = None
    stored_owner_id: str = ""
    account_id: str = ""
    account: ServiceAccount | None = None

    @property
    def owner_id(self) -> str:
        """The stable id of the caller with this token, which no other caller has."""
        if self.account_id:
            return build_account_owner_id(self.account_id)
        return self.stored_owner_id or build_token_owner_id(self.id)

    @property
    def effective_grants(self) -> tuple[str, ...]:
        """The grants of its account, or else its own."""
        return self.grants if self.account is None else self.account.grants

    def is_live(self, now_s: float) -> bool:
        """Return whether it is neither revoked nor expired. Its account may still be disabled."""
        return self.revoked_at_s is None and (self.expires_at_s is None or now_s < self.expires_at_s)
