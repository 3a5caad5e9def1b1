"""The record: events, decisions, the newest snapshot; and plans.

Who asks: API tokens and the audit log.

Webhooks: have events sent to a URL. A receiver checks what it is sent with `verify`.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

from api.client.connection import ClientMethods
from api.webhooks.signature import SignatureError, verify

if TYPE_CHECKING:
    from api.event_views import DecisionView, EventView, SnapshotView
    from api.plans import SolvedPlanView
    from api.tokens import AuditView, TokenView, WhoAmIView
    from api.webhooks.routes import DeliveryView, WebhookSecretView, WebhookView


class RecordMethods(ClientMethods):
    def events(self, *, subject: str = "", after: int = 0, limit: int = 100) -> Iterator[EventView]:
        """Events in order, of one subject or of all, a page of `limit` at a time. To follow them, ask again with
        `after` = the last one's number."""
        query = {"subject": subject, "after": str(after or "")}
        yield from self._connection.list_items("/v1/events", limit=limit, query=query)

    def decisions(self, *, limit: int = 100) -> Iterator[DecisionView]:
        yield from self._connection.list_items("/v1/decisions", limit=limit, query={})

    def snapshot(self) -> SnapshotView:
        """The newest snapshot, as `scheduler.domain.codec` encodes it."""
        return self._connection.request("GET", "/v1/snapshots/latest")

    def plan(self, request: Mapping[str, Any]) -> SolvedPlanView:
        """Solve a plan request on the service."""
        return self._connection.request("POST", "/v1/plans", json=request)


class TokenMethods(ClientMethods):
    def whoami(self) -> WhoAmIView:
        return cast("WhoAmIView", self._connection.request("GET", "/v1/whoami"))

    def create_token(self, name: str, grants: Sequence[str], *, expires_in_s: float | None = None) -> TokenView:
        """Make a token. Its `secret` is in this answer alone. `grants` as in submitter:research."""
        document = {"name": name, "grants": list(grants), "expires_in_s": expires_in_s}
        return cast("TokenView", self._connection.request("POST", "/v1/tokens", json=document))

    def tokens(self, *, limit: int = 100) -> Iterator[TokenView]:
        """All tokens, revoked and expired ones too."""
        for each in self._connection.list_items("/v1/tokens", limit=limit, query={}):
            yield cast("TokenView", each)

    def token(self, token_id: str) -> TokenView:
        return cast("TokenView", self._connection.request("GET", _token_path(token_id)))

    def revoke_token(self, token_id: str) -> TokenView:
        return cast("TokenView", self._connection.request("DELETE", _token_path(token_id)))

    def audit(
        self, *, actor: str = "", subject: str = "", since_s: float | None = None, limit: int = 1000
    ) -> Iterator[AuditView]:
        """Changes asked for, oldest first. `since_s` in seconds since 1970 (UTC)."""
        query = {"actor": actor, "subject": subject, "since_s": "" if since_s is None else repr(since_s)}
        for each in self._connection.list_items("/v1/audit", limit=limit, query=query):
            yield cast("AuditView", each)


def _token_path(token_id: str) -> str:
    return f"/v1/tokens/{quote(token_id, safe='')}"


__all__ = ["SignatureError", "WebhookMethods", "verify"]


class WebhookMethods(ClientMethods):
    def create_webhook(self, document: Mapping[str, Any], *, key: str = "") -> WebhookSecretView:
        """`{url, codes, queue, subject}`, all but the first optional. The answer's `secret` is shown this once. Where
        an answer is lost it is asked again, which makes no second webhook; `key`: by default one of this call alone."""
        made = self._connection.request("POST", "/v1/webhooks", json=document, key=key or secrets.token_hex(16))
        return cast("WebhookSecretView", made)

    def webhooks(self, *, limit: int = 100) -> Iterator[WebhookView]:
        for item in self._connection.list_items("/v1/webhooks", limit=limit, query={}):
            yield cast("WebhookView", item)

    def webhook(self, webhook_id: str) -> WebhookView:
        return cast("WebhookView", self._connection.request("GET", _webhook_path(webhook_id)))

    def change_webhook(self, webhook_id: str, change: Mapping[str, Any]) -> WebhookView:
        """Change `url`, `codes`, `subject` or `enabled`; what is left out stays."""
        return cast("WebhookView", self._connection.request("PATCH", _webhook_path(webhook_id), json=change))

    def delete_webhook(self, webhook_id: str) -> None:
        self._connection.request("DELETE", _webhook_path(webhook_id))

    def rotate_webhook_secret(self, webhook_id: str) -> WebhookSecretView:
        """A new secret; the old one is signed with as well for a day."""
        answer = self._connection.request("POST", f"{_webhook_path(webhook_id)}:rotate-secret")
        return cast("WebhookSecretView", answer)

    def test_webhook(self, webhook_id: str) -> DeliveryView:
        """Have a message of code Test sent; look for its id among the deliveries."""
        return cast("DeliveryView", self._connection.request("POST", f"{_webhook_path(webhook_id)}:test"))

    def webhook_deliveries(self, webhook_id: str, *, state: str = "", limit: int = 100) -> Iterator[DeliveryView]:
        """Newest first; `state`: pending, delivered or dead."""
        for item in self._connection.list_items(
            f"{_webhook_path(webhook_id)}/deliveries", limit=limit, query={"state": state}
        ):
            yield cast("DeliveryView", item)

    def redeliver(self, webhook_id: str, delivery_id: str) -> DeliveryView:
        path = f"{_webhook_path(webhook_id)}/deliveries/{quote(delivery_id, safe='')}:redeliver"
        return cast("DeliveryView", self._connection.request("POST", path))


def _webhook_path(webhook_id: str) -> str:
    return f"/v1/webhooks/{quote(webhook_id, safe='')}"
