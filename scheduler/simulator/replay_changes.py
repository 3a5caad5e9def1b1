"""Changes of a recorded cluster before it is replayed: other numbers of nodes, other lending limits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from scheduler.domain.fleet import PoolKind
from scheduler.domain.simulation_task import SimulationFiles


@dataclass(frozen=True, slots=True)
class ReplayChanges:
    """Nodes to add by pool (negative: to remove), and new values of lending limits of all inference pools."""

    nodes: Mapping[str, int]
    lending: Mapping[str, Any]

    def describe(self) -> str:
        """Return the changes as a list of words, or "no change"."""
        nodes = [f"{number:+d} nodes in {pool}" for pool, number in sorted(self.nodes.items()) if number]
        limits = [f"{name.replace('_', ' ')} {value:g}" for name, value in self.lending.items() if name != "enabled"]
        switched = self.lending.get("enabled")
        lending = [] if switched is None else ["with lending" if switched else "without lending"]
        return ", ".join([*nodes, *lending, *limits]) or "no change"


class ReplayError(ValueError):
    """A change does not fit the recorded cluster. The message is for people; the fields name what is wrong."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field}: got {value!r}; allowed: {allowed}")
        self.field, self.value, self.allowed = field, value, allowed


def apply_changes(files: SimulationFiles, changes: ReplayChanges) -> SimulationFiles:
    """Return the files with a changed cluster.

    Raises:
        ReplayError: a pool does not exist or would have no node.
    """
    cluster = json.loads(files.cluster)
    pools = {pool["name"]: pool for pool in cluster["pools"]}
    for name, added in changes.nodes.items():
        if name not in pools:
            raise ReplayError("nodes", name, f"pools with nodes: {', '.join(pools)}")
        nodes = pools[name]["nodes"]
        if nodes + added < 1:
            raise ReplayError(f"nodes.{name}", added, f"{1 - nodes} or more; the pool has {nodes}, and keeps 1 or more")
        pools[name]["nodes"] = nodes + added
    for pool in pools.values():
        if pool["kind"] == PoolKind.INFERENCE:
            pool["lending"] |= changes.lending
    return replace(files, cluster=json.dumps(cluster))
