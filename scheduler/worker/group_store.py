"""The key-value store over which the ranks of one job generation find each other."""

from __future__ import annotations

from datetime import timedelta

# torch exports these; its type stubs only forget to say so.
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # see above

from scheduler.worker.environment import RankEnvironment


def group_store(environment: RankEnvironment, *, timeout_s: float) -> Store:
    """A client of the executor's store, under names of this generation's own.

    Started by torchrun's kind of environment without an agent's store, rank 0 hosts it, as torch itself does; a lone
    process without any address keeps one in memory.
    """
    if not environment.has_store:
        return HashStore()
    hosts_it = environment.rank == 0 and not environment.agent_store
    server = TCPStore(
        environment.store_host,
        environment.store_port,
        environment.world_size,
        is_master=hosts_it,
        timeout=timedelta(seconds=timeout_s),
        multi_tenant=hosts_it,
    )
    return PrefixStore(f"{environment.job_id}/{environment.generation}", server)


def serve_store(host: str, *, port: int, listener_fd: int, timeout_s: float) -> TCPStore:
    """A store that listens on a socket of the caller's, bound to `host` and `port`; it closes `listener_fd` itself."""
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener_fd,
    )
