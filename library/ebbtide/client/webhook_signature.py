"""Check of webhook messages, by the Standard Webhooks specification (standardwebhooks.com, 1.0.0).

The signature is HMAC-SHA256 over `id.timestamp.body`, sent in the headers webhook-id, webhook-timestamp and
webhook-signature.
"""

from __future__ import annotations

import hmac
import time
from base64 import b64decode
from collections.abc import Mapping

SECRET_PREFIX = "whsec_"
TOLERANCE_S = 300.0


class SignatureError(ValueError):
    """The message was not signed with this secret within the last five minutes."""


def verify(headers: Mapping[str, str], body: bytes | str, secret: str) -> None:
    """Check that `body`, exactly as received, was signed with `secret` (`whsec_...`) within the last five minutes.

    A message is sent until the receiver answers 2xx, so the same `webhook-id` may arrive more than once.

    Raises:
        SignatureError: the signature does not match, is too old or too new, or a header is missing or malformed.
    """
    given = {name.lower(): value for name, value in headers.items()}
    message_id, timestamp = given.get("webhook-id", ""), given.get("webhook-timestamp", "")
    try:
        age_s = time.time() - float(timestamp)
        key = b64decode(secret.removeprefix(SECRET_PREFIX) + "==")  # padding, in case there is none; more is skipped
        signatures = [b64decode(text[3:]) for text in given.get("webhook-signature", "").split() if text[:3] == "v1,"]
    except ValueError as error:
        raise SignatureError(f"the secret or a header of the message is malformed: {error}") from None
    if not message_id or not key:
        raise SignatureError("the header webhook-id or the secret is empty")
    if not abs(age_s) <= TOLERANCE_S:
        raise SignatureError(f"the message was signed {age_s:.0f} s ago, but at most {TOLERANCE_S:.0f} s are accepted")
    content = body if isinstance(body, bytes) else body.encode()
    expected = hmac.digest(key, f"{message_id}.{timestamp}.".encode() + content, "sha256")
    if not any(hmac.compare_digest(expected, signature) for signature in signatures):
        raise SignatureError("no signature of the message was made with this secret")
