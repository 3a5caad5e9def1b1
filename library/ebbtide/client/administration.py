"""Client methods for events, decisions, snapshots, plans, API tokens, service accounts, the audit log and webhooks."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

from ebbtide.client.connection import ClientMethods

if TYPE_CHECKING:
    from api.accounts import ServiceAccountTokenView, ServiceAccountView
    from api.event_views import DecisionView, EventView, SnapshotView
    from api.plans import SolvedPlanView
    from api.sign_in import LoginCodeView
    from api.tokens import AuditView, ChainReportView, TokenView, WhoAmIView
    from api.webhooks.routes import DeliveryView, WebhookSecretView, WebhookView


class RecordMethods(ClientMethods):
    def events(self, *, subject: str = "", after: int = 0, limit: int = 100) -> Iterator[EventView]:
        """Yield events in order, of one subject or of all, after the number `after`. `limit` is the page size."""
        query = {"subject": subject, "after": str(after or "")}
        yield from self._connection.list_items("/v1/events", limit=limit, query=query)

    def decisions(self, *, limit: int = 100) -> Iterator[DecisionView]:
        yield from self._connection.list_items("/v1/decisions", limit=limit, query={})

    def snapshot(self) -> SnapshotView:
        """Return the newest snapshot in the encoding of `scheduler.domain.encoding`."""
        return self._connection.request("GET", "/v1/snapshots/latest")

    def plan(self, request: Mapping[str, Any]) -> SolvedPlanView:
        """Solve a plan request on the service."""
        return self._connection.request("POST", "/v1/plans", json=request)


class TokenMethods(ClientMethods):
    def whoami(self) -> WhoAmIView:
        return cast("WhoAmIView", self._connection.request("GET", "/v1/whoami"))

    def create_token(
        self, name: str, grants: Sequence[str], *, expires_in_s: float | None = None, key: str = ""
    ) -> TokenView:
        """Create a token with grants such as "submitter:research".

        `key` is the idempotency key, by default a random value per call. If the response of the first attempt was lost,
        that of a retry has no `secret`: revoke the token and create another.
        """
        document = {"name": name, "grants": list(grants), "expires_in_s": expires_in_s}
        created = self._connection.request("POST", "/v1/tokens", json=document, key=key or secrets.token_hex(16))
        return cast("TokenView", created)

    def tokens(self, *, limit: int = 100) -> Iterator[TokenView]:
        """Yield all tokens, including revoked and expired ones."""
        for item in self._connection.list_items("/v1/tokens", limit=limit, query={}):
            yield cast("TokenView", item)

    def token(self, token_id: str) -> TokenView:
        return cast("TokenView", self._connection.request("GET", _token_path(token_id)))

    def revoke_token(self, token_id: str) -> TokenView:
        return cast("TokenView", self._connection.request("DELETE", _token_path(token_id)))

    def verify_audit(self, digest: str = "") -> ChainReportView:
        """Check the hash chain of the audit log, and that it contains `digest`, unless that is empty."""
        return self._connection.request("GET", "/v1/audit:verify", query={"digest": digest} if digest else {})

    def create_login_code(self) -> LoginCodeView:
        """Create a code that signs a browser in to the web console, once, at `/#/login?code=`."""
        return cast("LoginCodeView", self._connection.request("POST", "/v1/login-codes"))

    def audit(
        self, *, actor: str = "", subject: str = "", since_s: float | None = None, limit: int = 1000
    ) -> Iterator[AuditView]:
        """Yield audit log entries, oldest first. `since_s` is in seconds since 1970 (UTC)."""
        query = {"actor": actor, "subject": subject, "since_s": "" if since_s is None else repr(since_s)}
        for item in self._connection.list_items("/v1/audit", limit=limit, query=query):
            yield cast("AuditView", item)


def _token_path(token_id: str) -> str:
    return f"/v1/tokens/{quote(token_id, safe='')}"


class AccountMethods(ClientMethods):
    """Service accounts. `key` is the idempotency key, as of `TokenMethods.create_token`."""

    def create_account(
        self,
        name: str,
        grants: Sequence[str],
        *,
        expires_in_s: float | None = None,
        token_expires_in_s: float | None = None,
        key: str = "",
    ) -> ServiceAccountTokenView:
        """Create a service account with its first token, whose `secret` only this response contains."""
        document = {
            "name": name,
            "grants": list(grants),
            "expires_in_s": expires_in_s,
            "token_expires_in_s": token_expires_in_s,
        }
        created = self._connection.request("POST", "/v1/accounts", json=document, key=key or secrets.token_hex(16))
        return cast("ServiceAccountTokenView", created)

    def accounts(self, *, limit: int = 100) -> Iterator[ServiceAccountView]:
        for item in self._connection.list_items("/v1/accounts", limit=limit, query={}):
            yield cast("ServiceAccountView", item)

    def account(self, name: str) -> ServiceAccountView:
        return cast("ServiceAccountView", self._connection.request("GET", _account_path(name)))

    def change_account(self, name: str, change: Mapping[str, Any]) -> ServiceAccountView:
        """Change `enabled`, `grants` or `expires_in_s`. Fields that are left out stay as they are."""
        return cast("ServiceAccountView", self._connection.request("PATCH", _account_path(name), json=change))

    def rotate_account(
        self, name: str, *, overlap_s: float | None = None, token_expires_in_s: float | None = None, key: str = ""
    ) -> ServiceAccountTokenView:
        """Create another token. Earlier tokens expire after `overlap_s`; None: after the service's default of a day."""
        document = {"token_expires_in_s": token_expires_in_s}
        if overlap_s is not None:
            document["overlap_s"] = overlap_s
        path = f"{_account_path(name)}:rotate"
        rotated = self._connection.request("POST", path, json=document, key=key or secrets.token_hex(16))
        return cast("ServiceAccountTokenView", rotated)

    def delete_account(self, name: str) -> None:
        self._connection.request("DELETE", _account_path(name))


def _account_path(name: str) -> str:
    return f"/v1/accounts/{quote(name, safe='')}"


class WebhookMethods(ClientMethods):
    def create_webhook(self, document: Mapping[str, Any], *, key: str = "") -> WebhookSecretView:
        """Create a webhook from `{url, codes, queue, subject}`; only `url` is required.

        Only this response contains its `secret`.

        `key` is the idempotency key, by default a random value per call; a retry after a lost response creates no
        second webhook.
        """
        created = self._connection.request("POST", "/v1/webhooks", json=document, key=key or secrets.token_hex(16))
        return cast("WebhookSecretView", created)

    def webhooks(self, *, limit: int = 100) -> Iterator[WebhookView]:
        for item in self._connection.list_items("/v1/webhooks", limit=limit, query={}):
            yield cast("WebhookView", item)

    def webhook(self, webhook_id: str) -> WebhookView:
        return cast("WebhookView", self._connection.request("GET", _webhook_path(webhook_id)))

    def change_webhook(self, webhook_id: str, change: Mapping[str, Any]) -> WebhookView:
        """Change `url`, `codes`, `subject` or `enabled`. Fields that are left out stay as they are."""
        return cast("WebhookView", self._connection.request("PATCH", _webhook_path(webhook_id), json=change))

    def delete_webhook(self, webhook_id: str) -> None:
        self._connection.request("DELETE", _webhook_path(webhook_id))

    def rotate_webhook_secret(self, webhook_id: str) -> WebhookSecretView:
        """Create a new secret. For one day, messages are signed with the old secret as well."""
        response = self._connection.request("POST", f"{_webhook_path(webhook_id)}:rotate-secret")
        return cast("WebhookSecretView", response)

    def test_webhook(self, webhook_id: str) -> DeliveryView:
        """Send a message with code Test. Find its outcome by id among the deliveries."""
        return cast("DeliveryView", self._connection.request("POST", f"{_webhook_path(webhook_id)}:test"))

    def webhook_deliveries(self, webhook_id: str, *, state: str = "", limit: int = 100) -> Iterator[DeliveryView]:
        """Yield deliveries, newest first. `state`: pending, delivered or dead."""
        for item in self._connection.list_items(
            f"{_webhook_path(webhook_id)}/deliveries", limit=limit, query={"state": state}
        ):
            yield cast("DeliveryView", item)

    def redeliver(self, webhook_id: str, delivery_id: str) -> DeliveryView:
        path = f"{_webhook_path(webhook_id)}/deliveries/{quote(delivery_id, safe='')}:redeliver"
        return cast("DeliveryView", self._connection.request("POST", path))


def _webhook_path(webhook_id: str) -> str:
    return f"/v1/webhooks/{quote(webhook_id, safe='')}"
