"""The rendezvous store of one job generation, in a process of its own.

`python -m scheduler.worker.rendezvous --port-file PATH` serves a torch TCPStore until its standard input closes, its
parent dies or it gets SIGTERM. It runs beside the controller, never in a rank: a rank may stand on a node that is
about to be handed back, and the store must not go with it.
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
from pathlib import Path

from scheduler.worker.group_store import serve_store

logger = logging.getLogger(__name__)

_PARENT_CHECK_PERIOD_S = 1.0
_STORE_TIMEOUT_S = 60.0


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s rendezvous %(levelname)s %(message)s")
    arguments = _arguments()
    parent_pid = os.getppid()
    with _told_to_stop() as stop_fd:
        with contextlib.closing(_listener(arguments.host)) as listener:
            port = listener.getsockname()[1]
            # The store closes the descriptor that it gets, hence a copy.
            listener_fd = os.dup(listener.fileno())
            store = serve_store(arguments.host, port=port, listener_fd=listener_fd, timeout_s=_STORE_TIMEOUT_S)
            _publish(port, arguments.port_file)
            logger.info("serving %s:%d", arguments.host, store.port)
            _wait_for_end(stop_fd, parent_pid)
        # The store owns copies of the socket and of threads that nobody needs to see end one by one.
        logging.shutdown()
        os._exit(0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scheduler.worker.rendezvous", description="Serve a TCPStore.")
    parser.add_argument("--port-file", type=Path, required=True, help="file that will hold the port")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    return parser.parse_args()


def _listener(host: str) -> socket.socket:
    """A socket bound to this address alone: by itself TCPStore would listen on every interface."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(128)
    return listener


def _publish(port: int, path: Path) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(f"{port}\n", encoding="ascii")
    part.replace(path)


@contextlib.contextmanager
def _told_to_stop() -> Iterator[int]:
    """A descriptor that becomes readable on SIGTERM, so that one wait watches all reasons to end."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    signal.set_wakeup_fd(write_fd)
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)
    yield read_fd
    signal.set_wakeup_fd(-1)


def _wait_for_end(stop_fd: int, parent_pid: int) -> None:
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
