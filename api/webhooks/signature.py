"""How messages to webhooks are signed, after the Standard Webhooks specification (standardwebhooks.com, 1.0.0):
HMAC-SHA256 over `id.timestamp.body`, in the headers webhook-id, webhook-timestamp and webhook-signature.

A receiver calls `verify`; the service calls `signed_headers`. Needs the standard library alone.
"""

from __future__ import annotations

import hmac
import time
from base64 import b64decode, b64encode
from binascii import Error as NotBase64Error
from collections.abc import Iterable, Mapping

SECRET_PREFIX = "whsec_"
TOLERANCE_S = 300.0


class SignatureError(ValueError):
    """The message is not one that the service signed with this secret just now."""


def derive_webhook_secret(service_secret: bytes, webhook_id: str, number: int) -> str:
    """The secret of a webhook, derived from the service's own: the database holds nothing that one could sign with."""
    key = hmac.digest(service_secret, f"webhook/{webhook_id}/{number}".encode(), "sha256")
    return SECRET_PREFIX + b64encode(key).decode()


def sign_message(message_id: str, body: bytes, secrets: Iterable[str], *, now_s: float) -> dict[str, str]:
    """The three headers of a message, with one signature a secret."""
    stamp = str(int(now_s))
    signatures = " ".join(_sign(secret, message_id, stamp, body) for secret in secrets)
    return {"webhook-id": message_id, "webhook-timestamp": stamp, "webhook-signature": signatures}


def verify(
    headers: Mapping[str, str],
    body: bytes | str,
    secret: str,
    *,
    tolerance_s: float = TOLERANCE_S,
    now_s: float | None = None,
) -> None:
    """Returns where `body`, as it was received, was signed with `secret` (`whsec_...`) in the last `tolerance_s`
    seconds. The same `webhook-id` may come again: a message is sent until it was answered with 2xx.

    Raises:
        SignatureError: it was not, or a header is missing; the message says which.
    """
    given = {name.lower(): value for name, value in headers.items()}
    for name in ("webhook-id", "webhook-timestamp", "webhook-signature"):
        if not given.get(name):
            raise SignatureError(f"{name}: the header is missing")
    stamp = given["webhook-timestamp"]
    if not (stamp.isascii() and stamp.isdigit()):
        raise SignatureError(f"webhook-timestamp: got {stamp[:40]!r}; allowed: seconds since 1970")
    age_s = (time.time() if now_s is None else now_s) - int(stamp)
    if abs(age_s) > tolerance_s:
        raise SignatureError(f"webhook-timestamp: {age_s:.0f} s old; allowed: at most {tolerance_s:.0f} s, either way")
    sent = body.encode() if isinstance(body, str) else body
    expected = _sign(secret, given["webhook-id"], stamp, sent).encode()
    signatures = given["webhook-signature"].encode().split(b" ")
    if not any(hmac.compare_digest(expected, one) for one in signatures):
        raise SignatureError("webhook-signature: none of the signatures is that of this secret and body")


def _sign(secret: str, message_id: str, stamp: str, body: bytes) -> str:
    try:
        key = b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except NotBase64Error:
        raise SignatureError(f"secret: allowed is {SECRET_PREFIX} and base64, as the service showed it") from None
    signed = b"%s.%s.%s" % (message_id.encode(), stamp.encode(), body)
    return f"v1,{b64encode(hmac.digest(key, signed, 'sha256')).decode()}"
