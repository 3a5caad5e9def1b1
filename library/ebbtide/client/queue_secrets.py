"""Client methods for secrets of queues."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from ebbtide.client.methods import ListMethod, RequestMethod
from ebbtide.client.requests import Pages, Request

if TYPE_CHECKING:
    from ebbtide.client.views import SecretView


class SecretMethods:
    @ListMethod
    def secrets(self, queue: str) -> Pages[SecretView]:
        """Return the secrets of a queue by name, without their values."""
        return Pages(_secrets_path(queue))

    @RequestMethod
    def set_secret(self, queue: str, name: str, value: bytes) -> Request[SecretView]:
        """Set the value of a secret, 6 to 65536 bytes. No method returns it."""
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(len(value))}
        path = f"{_secrets_path(queue)}/{quote(name, safe='')}"
        return Request("PUT", path, open_body=lambda: iter([value]), headers=headers)

    @RequestMethod
    def delete_secret(self, queue: str, name: str) -> Request[SecretView]:
        """Delete a secret. Jobs that need it wait from their next start on."""
        return Request("DELETE", f"{_secrets_path(queue)}/{quote(name, safe='')}")


def _secrets_path(queue: str) -> str:
    return f"/v1/queues/{quote(queue, safe='')}/secrets"
