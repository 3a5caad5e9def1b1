"""The key-value store over which the ranks of one job generation find each other.

The rendezvous store, in a process of its own: generations keep apart in it by the names of their keys.

`python -m scheduler.worker.rendezvous --port-file PATH` serves a torch TCPStore until its standard input closes, its
parent dies or it gets SIGTERM. It runs beside the controller, never in a rank: a rank may stand on a node that is
about to be handed back, and the store must not go with it.

`python -m scheduler.worker.rendezvous --port PORT [--host ADDRESS]` serves it on that port until SIGTERM: a service of
its own, for ranks on many nodes.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # see above

from scheduler.worker.environment import RankEnvironment

# torch exports these; its type stubs only forget to say so.


def connect_store(environment: RankEnvironment, *, timeout_s: float) -> Store:
    """A client of the executor's store, under names of this generation's own.

    Started by torchrun's kind of environment without an agent's store, rank 0 hosts it, as torch itself does; a lone
    process without any address keeps one in memory.
    """
    if not environment.has_store:
        return HashStore()
    hosts_it = environment.rank == 0 and not environment.uses_agent_store
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


logger = logging.getLogger(__name__)

_PARENT_CHECK_PERIOD_S = 1.0
_STORE_TIMEOUT_S = 60.0


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s rendezvous %(levelname)s %(message)s")
    arguments = _parse_arguments()
    parent_pid = os.getppid()
    with _watch_sigterm() as stop_fd:
        with contextlib.closing(_open_listener(arguments.host, arguments.port)) as listener:
            port = listener.getsockname()[1]
            # The store closes the descriptor that it gets, hence a copy.
            listener_fd = os.dup(listener.fileno())
            store = serve_store(arguments.host, port=port, listener_fd=listener_fd, timeout_s=_STORE_TIMEOUT_S)
            logger.info("serving %s:%d", arguments.host, store.port)
            if arguments.port_file is None:
                select.select([stop_fd], [], [])
            else:
                _write_port_file(port, arguments.port_file)
                _wait_until_stopped(stop_fd, parent_pid)
        # The store owns copies of the socket and of threads that nobody needs to see end one by one.
        logging.shutdown()
        os._exit(0)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scheduler.worker.rendezvous", description="Serve a TCPStore.")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--port-file", type=Path, help="file for a free port; serve while the parent lives")
    how.add_argument("--port", type=_parse_port, default=0, help="port to listen on; serve until SIGTERM")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    return parser.parse_args()


def _parse_port(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: 1 to 65535")
    return int(text)


def _open_listener(host: str, port: int) -> socket.socket:
    """A socket bound to this address alone, while TCPStore by itself would listen on every interface."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # A service that starts anew must not wait until the connections of the one before have timed out.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(128)
    return listener


def _write_port_file(port: int, path: Path) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(f"{port}\n", encoding="ascii")
    part.replace(path)


@contextlib.contextmanager
def _watch_sigterm() -> Iterator[int]:
    """A descriptor that becomes readable on SIGTERM, so that one wait watches all reasons to end."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    signal.set_wakeup_fd(write_fd)
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)
    yield read_fd
    signal.set_wakeup_fd(-1)


def _wait_until_stopped(stop_fd: int, parent_pid: int) -> None:
    stdin_fd = sys.stdin.fileno()
    while os.getppid() == parent_pid:
        readable, _, _ = select.select([stop_fd, stdin_fd], [], [], _PARENT_CHECK_PERIOD_S)
        if stop_fd in readable:
            logger.info("told to stop")
            return
        if stdin_fd in readable and not os.read(stdin_fd, 4096):
            logger.info("standard input closed")
            return
    logger.info("the parent is gone")


if __name__ == "__main__":
    main()
