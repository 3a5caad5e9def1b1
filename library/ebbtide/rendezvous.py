"""The rendezvous store, over which the ranks of one job generation find each other."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from ebbtide.environment import RankEnvironment

if TYPE_CHECKING:
    from torch.distributed import Store


def connect_store(environment: RankEnvironment, *, timeout_s: float) -> Store:
    """Return a client of the rendezvous store, with a key prefix for this generation.

    If no agent serves the store (plain torchrun variables), rank 0 hosts it, as torch itself does. A process without a
    store address keeps a store in memory.
    """
    from torch.distributed import HashStore, PrefixStore, TCPStore

    if not environment.has_store:
        return HashStore()
    is_host = environment.rank == 0 and not environment.uses_agent_store
    store = TCPStore(
        environment.store_host,
        environment.store_port,
        environment.world_size,
        is_master=is_host,
        timeout=timedelta(seconds=timeout_s),
        multi_tenant=is_host,
    )
    return PrefixStore(f"{environment.job_id}/{environment.generation}", store)
