"""serve: the application on a socket, until SIGTERM or SIGINT. Streams end at once then."""

from __future__ import annotations

import gc
import socket
import sys

import anyio.to_thread
import uvicorn
from fastapi import FastAPI

from api.streams.streams import Streams

SHUTDOWN_S = 10
"""What has not been answered then is given up."""
THREADS = 8
"""Requests that are worked on at a time; others wait their turn. More would only take the interpreter from one another:
of 4, 8, 16 and 40, 8 answered 120 submissions a second soonest."""
_COULD_NOT_START = 3


class Server(uvicorn.Server):
    """Uvicorn waits for all requests to end before it does, and a stream would not by itself."""

    def __init__(self, config: uvicorn.Config, streams: Streams) -> None:
        super().__init__(config)
        self._streams = streams

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        anyio.to_thread.current_default_thread_limiter().total_tokens = THREADS
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._streams.close()
        await super().shutdown(sockets)


def serve(app: FastAPI, *, host: str, port: int, is_shared: bool = False) -> None:
    """`is_shared`: other processes listen on the same port, and the kernel gives each connection to one of them."""
    config = uvicorn.Config(
        app, host=host, port=port, log_config=None, access_log=False, timeout_graceful_shutdown=SHUTDOWN_S
    )
    server = Server(config, app.state.streams)
    gc.collect()
    gc.freeze()  # what stays for good is not searched for garbage again and again, in the middle of requests
    try:
        server.run([_shared(host, port)] if is_shared else None)
    except KeyboardInterrupt:
        return  # it has ended as it should, and then passed the signal on
    if not server.started:
        sys.exit(_COULD_NOT_START)


def _shared(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048, reuse_port=True)
