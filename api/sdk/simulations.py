"""Simulations: hand in a trace, watch it being played, get the report."""

from __future__ import annotations

import gzip
import secrets
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast
from urllib.parse import quote

from api.answers.simulations import SimulationView
from api.connection import JsonObject
from api.sdk.calls import Calls


class SimulationCalls(Calls):
    def create_simulation(
        self,
        jobs: str,
        cluster: str | Mapping[str, Any],
        *,
        demand: str = "",
        policies: Sequence[str] = ("ebbtide",),
        seed: int = 0,
        key: str = "",
    ) -> SimulationView:
        """Hand in the texts of the files of `ebbtide simulate` (jobs and demand CSV, cluster YAML or its object). Where
        an answer is lost it is asked again, which hands in nothing twice; `key`: by default one of this call alone."""
        texts = {"jobs": jobs} | ({"demand": demand} if demand else {})
        packed = {name: {"gzip_base64": _packed(text)} for name, text in texts.items()}
        document = {**packed, "cluster": cluster, "policies": list(policies), "seed": seed}
        key = key or secrets.token_hex(16)
        return cast(SimulationView, self._connection.object("POST", "/v1/simulations", json=document, key=key))

    def simulations(self, *, limit: int = 100) -> Iterator[SimulationView]:
        """One's own, newest first."""
        for item in self._connection.items("/v1/simulations", limit=limit, query={}):
            yield cast(SimulationView, item)

    def simulation(self, simulation_id: str) -> SimulationView:
        return cast(SimulationView, self._connection.object("GET", _simulation(simulation_id)))

    def simulation_report(self, simulation_id: str) -> JsonObject:
        """What `ebbtide simulate -o json` prints."""
        return self._connection.object("GET", f"{_simulation(simulation_id)}/report")

    def cancel_simulation(self, simulation_id: str) -> SimulationView:
        return cast(SimulationView, self._connection.object("DELETE", _simulation(simulation_id)))


def _packed(text: str) -> str:
    return b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _simulation(simulation_id: str) -> str:
    return f"/v1/simulations/{quote(simulation_id, safe='')}"
