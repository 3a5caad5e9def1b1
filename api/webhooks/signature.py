"""Signatures of webhook messages, by the Standard Webhooks specification (standardwebhooks.com, 1.0.0).

The service signs with `sign_message`; a receiver checks with `ebbtide.client.webhook_signature.verify`. The signature
is HMAC-SHA256 over `id.timestamp.body`, sent in the headers webhook-id, webhook-timestamp and webhook-signature.
"""

from __future__ import annotations

import hmac
from base64 import b64encode
from collections.abc import Iterable
from datetime import UTC, datetime

from standardwebhooks.webhooks import Webhook

SECRET_PREFIX = "whsec_"


def derive_webhook_secret(service_secret: bytes, webhook_id: str, number: int) -> str:
    """Return a webhook's secret, derived from the service's own. The database stores no signing secret."""
    key = hmac.digest(service_secret, f"webhook/{webhook_id}/{number}".encode(), "sha256")
    return SECRET_PREFIX + b64encode(key).decode()


def sign_message(message_id: str, body: bytes, secrets: Iterable[str], *, now_s: float) -> dict[str, str]:
    """Return the three headers of a message, with one signature per secret."""
    text, signed_at = body.decode(), datetime.fromtimestamp(int(now_s), UTC)
    signatures = " ".join(Webhook(secret).sign(message_id, signed_at, text) for secret in secrets)
    return {"webhook-id": message_id, "webhook-timestamp": str(int(now_s)), "webhook-signature": signatures}
