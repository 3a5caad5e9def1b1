"""Who asks: API tokens and the audit log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast
from urllib.parse import quote

from api.answers.identity import AuditView, TokenView, WhoView
from api.sdk.calls import Calls


class TokenCalls(Calls):
    def whoami(self) -> WhoView:
        return cast(WhoView, self._connection.object("GET", "/v1/whoami"))

    def create_token(self, name: str, grants: Sequence[str], *, expires_in_s: float | None = None) -> TokenView:
        """Make a token. Its `secret` is in this answer alone. `grants` as in submitter:research."""
        document = {"name": name, "grants": list(grants), "expires_in_s": expires_in_s}
        return cast(TokenView, self._connection.object("POST", "/v1/tokens", json=document))

    def tokens(self, *, limit: int = 100) -> Iterator[TokenView]:
        """All tokens, revoked and expired ones too."""
        for each in self._connection.items("/v1/tokens", limit=limit, query={}):
            yield cast(TokenView, each)

    def token(self, token_id: str) -> TokenView:
        return cast(TokenView, self._connection.object("GET", _token(token_id)))

    def revoke_token(self, token_id: str) -> TokenView:
        return cast(TokenView, self._connection.object("DELETE", _token(token_id)))

    def audit(
        self, *, actor: str = "", subject: str = "", since_s: float | None = None, limit: int = 1000
    ) -> Iterator[AuditView]:
        """Changes asked for, oldest first. `since_s` in seconds since 1970 (UTC)."""
        query = {"actor": actor, "subject": subject, "since_s": "" if since_s is None else repr(since_s)}
        for each in self._connection.items("/v1/audit", limit=limit, query=query):
            yield cast(AuditView, each)


def _token(token_id: str) -> str:
    return f"/v1/tokens/{quote(token_id, safe='')}"
