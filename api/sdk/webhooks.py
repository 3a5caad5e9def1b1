"""Webhooks: have events sent to a URL. A receiver checks what it is sent with `verify`."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from typing import Any, cast
from urllib.parse import quote

from api.answers.webhooks import DeliveryView, WebhookSecretView, WebhookView
from api.sdk.calls import Calls
from api.webhooks.signature import SignatureError, verify

__all__ = ["SignatureError", "WebhookCalls", "verify"]


class WebhookCalls(Calls):
    def create_webhook(self, document: Mapping[str, Any], *, key: str = "") -> WebhookSecretView:
        """`{url, codes, queue, subject}`, all but the first optional. The answer's `secret` is shown this once. Where
        an answer is lost it is asked again, which makes no second webhook; `key`: by default one of this call alone."""
        made = self._connection.object("POST", "/v1/webhooks", json=document, key=key or secrets.token_hex(16))
        return cast(WebhookSecretView, made)

    def webhooks(self, *, limit: int = 100) -> Iterator[WebhookView]:
        for item in self._connection.items("/v1/webhooks", limit=limit, query={}):
            yield cast(WebhookView, item)

    def webhook(self, webhook_id: str) -> WebhookView:
        return cast(WebhookView, self._connection.object("GET", _webhook(webhook_id)))

    def change_webhook(self, webhook_id: str, change: Mapping[str, Any]) -> WebhookView:
        """Change `url`, `codes`, `subject` or `enabled`; what is left out stays."""
        return cast(WebhookView, self._connection.object("PATCH", _webhook(webhook_id), json=change))

    def delete_webhook(self, webhook_id: str) -> None:
        self._connection.object("DELETE", _webhook(webhook_id))

    def rotate_webhook_secret(self, webhook_id: str) -> WebhookSecretView:
        """A new secret; the old one is signed with as well for a day."""
        answer = self._connection.object("POST", f"{_webhook(webhook_id)}:rotate-secret")
        return cast(WebhookSecretView, answer)

    def test_webhook(self, webhook_id: str) -> DeliveryView:
        """Have a message of code Test sent; look for its id among the deliveries."""
        return cast(DeliveryView, self._connection.object("POST", f"{_webhook(webhook_id)}:test"))

    def webhook_deliveries(self, webhook_id: str, *, state: str = "", limit: int = 100) -> Iterator[DeliveryView]:
        """Newest first; `state`: pending, delivered or dead."""
        for item in self._connection.items(f"{_webhook(webhook_id)}/deliveries", limit=limit, query={"state": state}):
            yield cast(DeliveryView, item)

    def redeliver(self, webhook_id: str, delivery_id: str) -> DeliveryView:
        path = f"{_webhook(webhook_id)}/deliveries/{quote(delivery_id, safe='')}:redeliver"
        return cast(DeliveryView, self._connection.object("POST", path))


def _webhook(webhook_id: str) -> str:
    return f"/v1/webhooks/{quote(webhook_id, safe='')}"
