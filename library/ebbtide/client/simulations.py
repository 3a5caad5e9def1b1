"""Client methods for simulations: of files, and of what the service recorded."""

from __future__ import annotations

import gzip
import secrets
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ebbtide.client.methods import IteratorMethod, RequestMethod
from ebbtide.client.requests import Pages, Request
from ebbtide.client.responses import JsonObject

if TYPE_CHECKING:
    from ebbtide.client.views import SimulationChartsView, SimulationView


class SimulationMethods:
    @RequestMethod
    def create_simulation(
        self,
        jobs: str,
        cluster: str | Mapping[str, Any],
        *,
        demand: str = "",
        policies: Sequence[str] = ("ebbtide",),
        seed: int = 0,
        key: str = "",
    ) -> Request[SimulationView]:
        """Create a simulation from the texts of the files that `ebbtide simulate` reads.

        `jobs` and `demand` are CSV, `cluster` is YAML or the object itself. `key` is the idempotency key, by default a
        random value per call; a retry after a lost response creates no second simulation.
        """
        texts = {"jobs": jobs} | ({"demand": demand} if demand else {})
        packed = {name: {"gzip_base64": _compress(text)} for name, text in texts.items()}
        document = {**packed, "cluster": cluster, "policies": list(policies), "seed": seed}
        key = key or secrets.token_hex(16)
        return Request("POST", "/v1/simulations", json=document, key=key)

    @RequestMethod
    def replay(self, document: Mapping[str, Any], *, key: str = "") -> Request[SimulationView]:
        """Simulate what the service recorded in the last days, with changes: `{"days": 7, "nodes": {"training": 2}}`.

        It needs the role admin. `key` as for `create_simulation`.
        """
        return Request("POST", "/v1/simulations:replay", json=document, key=key or secrets.token_hex(16))

    @IteratorMethod
    def simulations(self, *, limit: int = 100) -> Pages[SimulationView]:
        """Yield the caller's own simulations, newest first."""
        return Pages("/v1/simulations", limit=limit)

    @RequestMethod
    def simulation(self, simulation_id: str) -> Request[SimulationView]:
        return Request("GET", _simulation_path(simulation_id))

    @RequestMethod
    def simulation_report(self, simulation_id: str) -> Request[JsonObject]:
        """Return the report that `ebbtide simulate -o json` prints."""
        return Request("GET", f"{_simulation_path(simulation_id)}/report")

    @RequestMethod
    def simulation_series(self, simulation_id: str) -> Request[SimulationChartsView]:
        """Return the time series of the report's charts."""
        return Request("GET", f"{_simulation_path(simulation_id)}/series")

    @RequestMethod
    def cancel_simulation(self, simulation_id: str) -> Request[SimulationView]:
        return Request("DELETE", _simulation_path(simulation_id))


def _compress(text: str) -> str:
    return b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _simulation_path(simulation_id: str) -> str:
    return f"/v1/simulations/{quote(simulation_id, safe='')}"
