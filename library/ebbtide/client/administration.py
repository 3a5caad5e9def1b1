"""Client methods for events, decisions, snapshots, plans, API tokens, service accounts, the audit log and webhooks."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from ebbtide.client.methods import IteratorMethod, RequestMethod
from ebbtide.client.requests import Pages, Request, discard

if TYPE_CHECKING:
    from ebbtide.client.views import (
        AuditView,
        ChainReportView,
        DecisionView,
        DeliveryView,
        EventView,
        LoginCodeView,
        ServiceAccountTokenView,
        ServiceAccountView,
        SettingView,
        SnapshotView,
        SolvedPlanView,
        TokenView,
        WebhookSecretView,
        WebhookView,
        WhoAmIView,
    )


class RecordMethods:
    @IteratorMethod
    def events(self, *, subject: str = "", after: int = 0, limit: int = 100) -> Pages[EventView]:
        """Yield events in order, of one subject or of all, after the number `after`. `limit` is the page size."""
        query = {"subject": subject, "after": str(after or "")}
        return Pages("/v1/events", limit=limit, query=query)

    @IteratorMethod
    def decisions(self, *, subject: str = "", kind: str = "", limit: int = 100) -> Pages[DecisionView]:
        """Yield decisions in order, about one job or node and of one kind, or all. `limit` is the page size."""
        return Pages("/v1/decisions", limit=limit, query={"subject": subject, "kind": kind})

    @RequestMethod
    def snapshot(self) -> Request[SnapshotView]:
        """Return the newest snapshot in the encoding of `scheduler.domain.encoding`."""
        return Request("GET", "/v1/snapshots/latest")

    @RequestMethod
    def plan(self, request: Mapping[str, Any]) -> Request[SolvedPlanView]:
        """Solve a plan request on the service."""
        return Request("POST", "/v1/plans", json=request)


class TokenMethods:
    @RequestMethod
    def whoami(self) -> Request[WhoAmIView]:
        return Request("GET", "/v1/whoami")

    @RequestMethod
    def create_token(
        self, name: str, grants: Sequence[str], *, expires_in_s: float | None = None, key: str = ""
    ) -> Request[TokenView]:
        """Create a token with grants such as "submitter:research".

        `key` is the idempotency key, by default a random value per call. If the response of the first attempt was lost,
        that of a retry has no `secret`: revoke the token and create another.
        """
        document = {"name": name, "grants": list(grants), "expires_in_s": expires_in_s}
        return Request("POST", "/v1/tokens", json=document, key=key or secrets.token_hex(16))

    @IteratorMethod
    def tokens(self, *, limit: int = 100) -> Pages[TokenView]:
        """Yield all tokens, including revoked and expired ones."""
        return Pages("/v1/tokens", limit=limit)

    @RequestMethod
    def token(self, token_id: str) -> Request[TokenView]:
        return Request("GET", _token_path(token_id))

    @RequestMethod
    def revoke_token(self, token_id: str) -> Request[TokenView]:
        return Request("DELETE", _token_path(token_id))

    @IteratorMethod
    def settings(self) -> Pages[SettingView]:
        """Yield the settings of the service by name, without values of secrets."""
        return Pages("/v1/settings")

    @RequestMethod
    def verify_audit(self, digest: str = "") -> Request[ChainReportView]:
        """Check the hash chain of the audit log, and that it contains `digest`, unless that is empty."""
        return Request("GET", "/v1/audit:verify", query={"digest": digest} if digest else {})

    @RequestMethod
    def create_login_code(self) -> Request[LoginCodeView]:
        """Create a code that signs a browser in to the web console, once, at `/#/login?code=`."""
        return Request("POST", "/v1/login-codes")

    @IteratorMethod
    def audit(
        self,
        *,
        actor: str = "",
        actor_id: str = "",
        subject: str = "",
        since_s: float | None = None,
        order: Literal["oldest", "newest"] = "oldest",
        limit: int = 1000,
    ) -> Pages[AuditView]:
        """Yield audit log entries. `order` says which come first, and `since_s` is in seconds since 1970 (UTC)."""
        since = "" if since_s is None else repr(since_s)
        query = {"actor": actor, "actor_id": actor_id, "subject": subject, "since_s": since, "order": order}
        return Pages("/v1/audit", limit=limit, query=query)


def _token_path(token_id: str) -> str:
    return f"/v1/tokens/{quote(token_id, safe='')}"


class AccountMethods:
    """Service accounts. `key` is the idempotency key, as of `TokenMethods.create_token`."""

    @RequestMethod
    def create_account(
        self,
        name: str,
        grants: Sequence[str],
        *,
        expires_in_s: float | None = None,
        token_expires_in_s: float | None = None,
        key: str = "",
    ) -> Request[ServiceAccountTokenView]:
        """Create a service account with its first token, whose `secret` only this response contains."""
        document = {
            "name": name,
            "grants": list(grants),
            "expires_in_s": expires_in_s,
            "token_expires_in_s": token_expires_in_s,
        }
        return Request("POST", "/v1/accounts", json=document, key=key or secrets.token_hex(16))

    @IteratorMethod
    def accounts(self, *, limit: int = 100) -> Pages[ServiceAccountView]:
        return Pages("/v1/accounts", limit=limit)

    @RequestMethod
    def account(self, name: str) -> Request[ServiceAccountView]:
        return Request("GET", _account_path(name))

    @RequestMethod
    def change_account(self, name: str, change: Mapping[str, Any]) -> Request[ServiceAccountView]:
        """Change `enabled`, `grants` or `expires_in_s`. Fields that are left out stay as they are."""
        return Request("PATCH", _account_path(name), json=change)

    @RequestMethod
    def rotate_account(
        self, name: str, *, overlap_s: float | None = None, token_expires_in_s: float | None = None, key: str = ""
    ) -> Request[ServiceAccountTokenView]:
        """Create another token. Earlier tokens expire after `overlap_s`; None: after the service's default of a day."""
        document = {"token_expires_in_s": token_expires_in_s}
        if overlap_s is not None:
            document["overlap_s"] = overlap_s
        path = f"{_account_path(name)}:rotate"
        return Request("POST", path, json=document, key=key or secrets.token_hex(16))

    @RequestMethod
    def delete_account(self, name: str) -> Request[None]:
        return Request("DELETE", _account_path(name), read=discard)


def _account_path(name: str) -> str:
    return f"/v1/accounts/{quote(name, safe='')}"


class WebhookMethods:
    @RequestMethod
    def create_webhook(self, document: Mapping[str, Any], *, key: str = "") -> Request[WebhookSecretView]:
        """Create a webhook from `{url, codes, queue, subject}`; only `url` is required.

        Only this response contains its `secret`.

        `key` is the idempotency key, by default a random value per call; a retry after a lost response creates no
        second webhook.
        """
        return Request("POST", "/v1/webhooks", json=document, key=key or secrets.token_hex(16))

    @IteratorMethod
    def webhooks(self, *, limit: int = 100) -> Pages[WebhookView]:
        return Pages("/v1/webhooks", limit=limit)

    @RequestMethod
    def webhook(self, webhook_id: str) -> Request[WebhookView]:
        return Request("GET", _webhook_path(webhook_id))

    @RequestMethod
    def change_webhook(self, webhook_id: str, change: Mapping[str, Any]) -> Request[WebhookView]:
        """Change `url`, `codes`, `subject` or `enabled`. Fields that are left out stay as they are."""
        return Request("PATCH", _webhook_path(webhook_id), json=change)

    @RequestMethod
    def delete_webhook(self, webhook_id: str) -> Request[None]:
        return Request("DELETE", _webhook_path(webhook_id), read=discard)

    @RequestMethod
    def rotate_webhook_secret(self, webhook_id: str) -> Request[WebhookSecretView]:
        """Create a new secret. For one day, messages are signed with the old secret as well."""
        return Request("POST", f"{_webhook_path(webhook_id)}:rotate-secret")

    @RequestMethod
    def test_webhook(self, webhook_id: str) -> Request[DeliveryView]:
        """Send a message with code Test. Find its outcome by id among the deliveries."""
        return Request("POST", f"{_webhook_path(webhook_id)}:test")

    @IteratorMethod
    def webhook_deliveries(self, webhook_id: str, *, state: str = "", limit: int = 100) -> Pages[DeliveryView]:
        """Yield deliveries, newest first. `state`: pending, delivered or dead."""
        return Pages(f"{_webhook_path(webhook_id)}/deliveries", limit=limit, query={"state": state})

    @RequestMethod
    def redeliver(self, webhook_id: str, delivery_id: str) -> Request[DeliveryView]:
        path = f"{_webhook_path(webhook_id)}/deliveries/{quote(delivery_id, safe='')}:redeliver"
        return Request("POST", path)


def _webhook_path(webhook_id: str) -> str:
    return f"/v1/webhooks/{quote(webhook_id, safe='')}"
