"""HTTP client of an inference engine's sleep mode, as vLLM offers it: `/sleep`, `/wake_up` and `/is_sleeping`.

It calls one base URL per engine, follows no redirect, uses no proxy, and limits time and size of each response.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

CONNECT_TIMEOUT_S = 3.0
CHECK_TIMEOUT_S = 5.0
RESPONSE_BYTES_MAX = 16_384
_PAUSE_S, _PAUSE_S_MAX = 0.1, 2.0
_ENABLE_HINT = "start the engine with its sleep mode and its sleep endpoints"


class ReplicaError(Exception):
    """A replica did not do what was ordered. The message says why. `is_final`: another attempt cannot help."""

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


@dataclass(frozen=True, slots=True)
class Engine:
    """The HTTP API of a replica at a base URL. An order must be carried out within `timeout_s`."""

    url: str
    level: int
    timeout_s: float


class EngineClient:
    """Puts engines to sleep and wakes them. Thread-safe. `stop` ends the wait for an engine."""

    def __init__(self, stop: threading.Event, *, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._http = httpx.Client(follow_redirects=False, trust_env=False, headers={"Accept": "application/json"})
        self._stop = stop
        self._monotonic_s = monotonic_s

    def close(self) -> None:
        self._http.close()

    def bring(self, engine: Engine, *, asleep: bool, is_wanted: Callable[[], bool] = lambda: True) -> bool:
        """Put the engine to sleep, or wake it, and confirm by its own statement. Does nothing if it is so already.

        Return False if `is_wanted` said meanwhile that the order does not count any more.

        Raises:
            ReplicaError: it did not get there within the engine's timeout, or cannot.
        """
        until_s, pause_s, is_ordered = self._monotonic_s() + engine.timeout_s, _PAUSE_S, False
        while is_wanted():
            try:
                if self._is_sleeping(engine, until_s) is asleep:
                    return True
                if not is_ordered:
                    self._order(engine, until_s, asleep=asleep)
                    is_ordered = True
                    continue
                problem = f"it accepted the order, but is still {'awake' if asleep else 'asleep'}"
            except ReplicaError as error:
                if error.is_final:
                    raise
                problem, is_ordered = str(error), False
            if self._monotonic_s() + pause_s >= until_s or self._stop.wait(pause_s):
                raise ReplicaError(f"{problem} after {engine.timeout_s:g} s")
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)
        return False

    def _is_sleeping(self, engine: Engine, until_s: float) -> bool:
        """Return what the engine states."""
        text = self._call(engine, "GET", "/is_sleeping", min(until_s, self._monotonic_s() + CHECK_TIMEOUT_S))
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict) or not isinstance(found.get("is_sleeping"), bool):
            raise ReplicaError('GET /is_sleeping did not answer {"is_sleeping": true} or {"is_sleeping": false}')
        return bool(found["is_sleeping"])

    def _order(self, engine: Engine, until_s: float, *, asleep: bool) -> None:
        if asleep:
            self._call(engine, "POST", f"/sleep?level={engine.level}", until_s)
        elif engine.level == 1:
            self._call(engine, "POST", "/wake_up", until_s)
        else:  # level 2 has dropped the weights: they are loaded into memory that is already theirs
            self._call(engine, "POST", "/wake_up?tags=weights", until_s)
            self._call(engine, "POST", "/collective_rpc", until_s, body={"method": "reload_weights"})
            self._call(engine, "POST", "/wake_up?tags=kv_cache", until_s)

    def _call(self, engine: Engine, method: str, path: str, until_s: float, *, body: Any = None) -> str:
        """Return the text of a response with status 200."""
        name = f"{method} {path}"
        left_s = max(0.001, until_s - self._monotonic_s())
        timeout = httpx.Timeout(left_s, connect=min(left_s, CONNECT_TIMEOUT_S))
        try:
            with self._http.stream(method, engine.url + path, json=body, timeout=timeout) as response:
                text = self._read(response, name, until_s)
        except httpx.TimeoutException:
            raise ReplicaError(f"{name} did not answer") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ReplicaError(f"{name} failed: {error or type(error).__name__}") from None
        status = response.status_code
        if status != httpx.codes.OK:
            hint = f": {_ENABLE_HINT}" if status == httpx.codes.NOT_FOUND else ""
            raise ReplicaError(f"{name} answered {status}{hint}", is_final=status < httpx.codes.INTERNAL_SERVER_ERROR)
        return text

    def _read(self, response: httpx.Response, name: str, until_s: float) -> str:
        received = bytearray()
        for chunk in response.iter_raw():
            received += chunk
            if len(received) > RESPONSE_BYTES_MAX:
                raise ReplicaError(f"{name} answered more than {RESPONSE_BYTES_MAX} bytes", is_final=True)
            if self._monotonic_s() >= until_s:
                raise ReplicaError(f"{name} did not end its answer")
        return received.decode("utf-8", "replace")
