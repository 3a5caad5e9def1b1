"""Signatures of webhook messages, by the Standard Webhooks specification (standardwebhooks.com, 1.0.0).

The service signs with `sign_message`; a receiver checks with `verify`. The signature is HMAC-SHA256 over
`id.timestamp.body`, sent in the headers webhook-id, webhook-timestamp and webhook-signature.
"""

from __future__ import annotations

import hmac
from base64 import b64encode
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

from standardwebhooks.webhooks import EmptyWebhookSecretError, Webhook, WebhookVerificationError

SECRET_PREFIX = "whsec_"


class SignatureError(ValueError):
    """The message was not signed with this secret within the last five minutes."""


def derive_webhook_secret(service_secret: bytes, webhook_id: str, number: int) -> str:
    """Return a webhook's secret, derived from the service's own. The database stores no signing secret."""
    key = hmac.digest(service_secret, f"webhook/{webhook_id}/{number}".encode(), "sha256")
    return SECRET_PREFIX + b64encode(key).decode()


def sign_message(message_id: str, body: bytes, secrets: Iterable[str], *, now_s: float) -> dict[str, str]:
    """Return the three headers of a message, with one signature per secret."""
    text, signed_at = body.decode(), datetime.fromtimestamp(int(now_s), UTC)
    signatures = " ".join(Webhook(secret).sign(message_id, signed_at, text) for secret in secrets)
    return {"webhook-id": message_id, "webhook-timestamp": str(int(now_s)), "webhook-signature": signatures}


def verify(headers: Mapping[str, str], body: bytes | str, secret: str) -> None:
    """Check that `body`, exactly as received, was signed with `secret` (`whsec_...`) within the last five minutes.

    A message is sent until the receiver answers 2xx, so the same `webhook-id` may arrive more than once.

    Raises:
        SignatureError: the signature does not match, is too old or too new, or a header is missing or malformed.
    """
    try:
        Webhook(secret).verify(body, dict(headers), json_parse=False)
    except (WebhookVerificationError, EmptyWebhookSecretError) as error:
        raise SignatureError(f"the message is not authentic: {error}") from None
    except ValueError as error:  # the library lets malformed base64, UTF-8 and signature lists through
        raise SignatureError(f"the secret or a header of the message is malformed: {error}") from None
