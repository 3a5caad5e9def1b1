"""The rendezvous store, over which the ranks of one job generation find each other.

`python -m scheduler.worker.rendezvous --port-file PATH` serves a torch TCPStore until its standard input closes, its
parent dies or it gets SIGTERM. It runs next to the controller, never in a rank, because the node of a rank may be
returned while the store is still needed.

`python -m scheduler.worker.rendezvous --port PORT [--host ADDRESS]` serves the store on that port until SIGTERM, as a
service of its own for ranks on many nodes.
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

from torch.distributed import TCPStore

logger = logging.getLogger(__name__)

_PARENT_CHECK_PERIOD_S = 1.0
_STORE_TIMEOUT_S = 60.0


def serve_store(host: str, *, port: int, listener_fd: int, timeout_s: float) -> TCPStore:
    """Serve a store on a listening socket that is bound to `host` and `port`. The store closes `listener_fd`."""
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener_fd,
    )


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s rendezvous %(levelname)s %(message)s")
    arguments = _parse_arguments()
    parent_pid = os.getppid()
    with _watch_sigterm() as stop_fd:
        with contextlib.closing(_open_listener(arguments.host, arguments.port)) as listener:
            port = listener.getsockname()[1]
            # The store closes its descriptor, so it gets a copy.
            listener_fd = os.dup(listener.fileno())
            store = serve_store(arguments.host, port=port, listener_fd=listener_fd, timeout_s=_STORE_TIMEOUT_S)
            logger.info("Serving on %s:%d", arguments.host, store.port)
            if arguments.port_file is None:
                select.select([stop_fd], [], [])
            else:
                _write_port_file(port, arguments.port_file)
                _wait_until_stopped(stop_fd, parent_pid)
        # Exit without the destructors, which would wait for the store's threads.
        logging.shutdown()
        os._exit(0)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scheduler.worker.rendezvous", description="Serve a TCPStore.")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--port-file", type=Path, help="write a free port to this file; serve while the parent lives")
    mode.add_argument("--port", type=_parse_port, default=0, help="port to listen on; serve until SIGTERM")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    return parser.parse_args()


def _parse_port(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port. Use 1 to 65535.")
    return int(text)


def _open_listener(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to `host` alone. TCPStore itself would listen on every interface."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # A restarted service must not wait until the old connections have timed out.
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
    """Yield a descriptor that becomes readable on SIGTERM, so that `select` can wait for it."""
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
            logger.info("Stopped by SIGTERM")
            return
        if stdin_fd in readable and not os.read(stdin_fd, 4096):
            logger.info("Stopped: standard input was closed")
            return
    logger.info("Stopped: the parent process has ended")


if __name__ == "__main__":
    main()
