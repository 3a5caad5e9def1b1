"""Client methods for machines and join tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from ebbtide.client.methods import ListMethod, RequestMethod
from ebbtide.client.requests import Pages, Request

if TYPE_CHECKING:
    from ebbtide.client.views import JoinTokenView, MachineDetailsView, MachineView


class MachineMethods:
    @ListMethod
    def machines(self) -> Pages[MachineView]:
        """Return all machines by name, including revoked ones, without their inventories."""
        return Pages("/v1/machines")

    @RequestMethod
    def machine(self, name: str) -> Request[MachineDetailsView]:
        """Return a machine with its inventory."""
        return Request("GET", _machine_path(name))

    @RequestMethod
    def remove_machine(self, name: str) -> Request[MachineView]:
        """Revoke the machine's credential. Its node stays."""
        return Request("DELETE", _machine_path(name))

    @RequestMethod
    def create_join_token(
        self, pool: str, *, uses: int = 1, expires_in_s: float | None = None
    ) -> Request[JoinTokenView]:
        """Create a token with which `uses` machines may join the pool, by default within an hour.

        Only this response contains its `secret`.
        """
        lifetime = {} if expires_in_s is None else {"expires_in_s": expires_in_s}
        document = {"pool": pool, "uses": uses, **lifetime}
        return Request("POST", "/v1/machines/tokens", json=document)

    @ListMethod
    def join_tokens(self) -> Pages[JoinTokenView]:
        """Return all join tokens, including used and expired ones."""
        return Pages("/v1/machines/tokens")

    @RequestMethod
    def delete_join_token(self, token_id: str) -> Request[JoinTokenView]:
        """Delete a join token. Machines that joined with it stay."""
        return Request("DELETE", f"/v1/machines/tokens/{quote(token_id, safe='')}")


def _machine_path(name: str) -> str:
    return f"/v1/machines/{quote(name, safe='')}"
