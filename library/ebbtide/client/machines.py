"""Client methods for machines and join tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from ebbtide.client.connection import ClientMethods

if TYPE_CHECKING:
    from api.machines import JoinTokenView, MachineDetailsView, MachineView


class MachineMethods(ClientMethods):
    def machines(self) -> list[MachineView]:
        """Return all machines by name, including revoked ones, without their inventories."""
        return list(self._connection.list_items("/v1/machines", query={}))

    def machine(self, name: str) -> MachineDetailsView:
        """Return a machine with its inventory."""
        return self._connection.request("GET", _machine_path(name))

    def remove_machine(self, name: str) -> MachineView:
        """Revoke the machine's credential. Its node stays."""
        return self._connection.request("DELETE", _machine_path(name))

    def create_join_token(self, pool: str, *, uses: int = 1, expires_in_s: float | None = None) -> JoinTokenView:
        """Create a token with which `uses` machines may join the pool, by default within an hour.

        Only this response contains its `secret`.
        """
        lifetime = {} if expires_in_s is None else {"expires_in_s": expires_in_s}
        document = {"pool": pool, "uses": uses, **lifetime}
        return self._connection.request("POST", "/v1/machines/tokens", json=document)

    def join_tokens(self) -> list[JoinTokenView]:
        """Return all join tokens, including used and expired ones."""
        return list(self._connection.list_items("/v1/machines/tokens", query={}))

    def delete_join_token(self, token_id: str) -> JoinTokenView:
        """Delete a join token. Machines that joined with it stay."""
        return self._connection.request("DELETE", f"/v1/machines/tokens/{quote(token_id, safe='')}")


def _machine_path(name: str) -> str:
    return f"/v1/machines/{quote(name, safe='')}"
