"""Client methods for secrets of queues."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from ebbtide.client.connection import ClientMethods

if TYPE_CHECKING:
    from api.queue_secrets.routes import SecretView


class SecretMethods(ClientMethods):
    def secrets(self, queue: str) -> list[SecretView]:
        """Return the secrets of a queue by name, without their values."""
        return list(self._connection.list_items(_secrets_path(queue), query={}))

    def set_secret(self, queue: str, name: str, value: bytes) -> SecretView:
        """Set the value of a secret, 6 to 65536 bytes. No method returns it."""
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(len(value))}
        path = f"{_secrets_path(queue)}/{quote(name, safe='')}"
        return self._connection.request("PUT", path, open_body=lambda: iter([value]), headers=headers)

    def delete_secret(self, queue: str, name: str) -> SecretView:
        """Delete a secret. Jobs that need it wait from their next start on."""
        return self._connection.request("DELETE", f"{_secrets_path(queue)}/{quote(name, safe='')}")


def _secrets_path(queue: str) -> str:
    return f"/v1/queues/{quote(queue, safe='')}/secrets"
