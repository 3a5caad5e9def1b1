"""The HTTP connection to an API server: who we are, how we reach it, one exchange, one stream of lines.

The only module that imports `kubernetes` (its configuration loading and REST client) and `urllib3`.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import urllib3
import yaml
from kubernetes.client import ApiClient, Configuration
from kubernetes.client.exceptions import ApiException
from kubernetes.config import ConfigException, load_incluster_config, load_kube_config

from scheduler.kubernetes.api_error import NO_RESPONSE, ApiError, parse_error_response
from scheduler.kubernetes.api_requests import ApiRequest

CONNECTIONS_MAX = 64
CHUNK_BYTES = 1 << 16
NOT_SENT_ERRORS = (urllib3.exceptions.NewConnectionError, urllib3.exceptions.ConnectTimeoutError)


class NoClusterError(ValueError):
    """Nothing says where the API server is, or what says so cannot be used."""


class ResponseLines:
    """The lines of an answer that has no end of its own. One thread reads; `close` may come from any thread and ends
    a read that waits."""

    def __init__(self, response: urllib3.HTTPResponse) -> None:
        self._response = response
        self._closed = threading.Event()

    def __iter__(self) -> Iterator[bytes]:
        """Raises ApiError when the connection breaks or stays silent for longer than its read timeout."""
        rest = b""
        try:
            for chunk in self._response.stream(CHUNK_BYTES, decode_content=True):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from filter(None, lines)
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            # A socket shut down under a reader fails in many ways; none of them is news when it was we who closed.
            if not self._closed.is_set():
                raise _no_response_error(error) from error
        finally:
            self._response.close()

    def close(self) -> None:
        self._closed.set()
        try:
            self._response.shutdown()
        except (ValueError, RuntimeError, OSError):
            return  # the answer had ended already


class Connection:
    """Thread-safe: a pool of connections to one API server."""

    def __init__(self, configuration: Configuration, *, connect_timeout_s: float, read_timeout_s: float) -> None:
        configuration.connection_pool_maxsize = CONNECTIONS_MAX
        configuration.keep_alive = True
        # The library would repeat requests by itself, and knows neither our deadline nor what is safe to repeat.
        configuration.retries = False
        self._configuration = configuration
        self._connect_s = connect_timeout_s
        self._read_s = read_timeout_s
        self._rest: Any = ApiClient(configuration).rest_client
        self._auth_lock = threading.Lock()

    @property
    def host(self) -> str:
        return str(self._configuration.host)

    def send(self, request: ApiRequest) -> Any:
        """The answer's JSON. Raises ApiError."""
        try:
            answer = self._request(request, read_timeout_s=self._read_s)
            body = answer.read()
        except (urllib3.exceptions.HTTPError, ApiException) as error:
            raise _no_response_error(error) from error
        if not 200 <= answer.status < 300:
            raise parse_error_response(answer.status, answer.headers, body)
        try:
            return json.loads(body)
        except ValueError as error:
            raise _no_response_error(error) from error

    def stream(self, request: ApiRequest, *, idle_timeout_s: float) -> ResponseLines:
        """Lines until the server ends them; silence longer than `silence_s` is an error. Raises ApiError."""
        try:
            answer = self._request(request, read_timeout_s=idle_timeout_s)
            if 200 <= answer.status < 300:
                return ResponseLines(answer.response)
            body = answer.read()
        except (urllib3.exceptions.HTTPError, ApiException) as error:
            raise _no_response_error(error) from error
        raise parse_error_response(answer.status, answer.headers, body)

    def close(self) -> None:
        self._rest.close()

    def _request(self, request: ApiRequest, *, read_timeout_s: float) -> Any:
        headers = {"Accept": "application/json", "User-Agent": "ebbtide", **self._authorization()}
        if request.body is not None:
            headers["Content-Type"] = request.content_type
        target = f"{request.path}?{urlencode(request.query)}" if request.query else request.path
        return self._rest.request(
            request.method,
            self.host + target,
            headers=headers,
            body=request.body,
            _request_timeout=(self._connect_s, read_timeout_s),
        )

    def _authorization(self) -> dict[str, str]:
        """Asked for anew with every request: a service account's token file and a plugin's token change over time."""
        with self._auth_lock:
            token = self._configuration.get_api_key_with_prefix("BearerToken")
        return {"Authorization": token.strip()} if token else {}


def load_configuration(kubeconfig: str | Path = "") -> Configuration:
    """From the file named, else from those in KUBECONFIG, else from the service account of the pod we run in."""
    configuration = Configuration()
    named = str(kubeconfig) or os.environ.get("KUBECONFIG", "")
    try:
        if named:
            load_kube_config(  # type: ignore[no-untyped-call]  # left untyped there
                named, client_configuration=configuration, persist_config=False
            )
        else:
            # left untyped there, as above
            load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except (ConfigException, OSError, TypeError, ValueError, yaml.YAMLError) as error:
        if named:
            raise NoClusterError(f"kubeconfig {named!r} cannot be used: {error}") from error
        raise NoClusterError(
            f"no Kubernetes cluster: name a kubeconfig, set KUBECONFIG, or run in a pod with a service account: {error}"
        ) from error
    return configuration


def _no_response_error(error: Exception) -> ApiError:
    return ApiError(NO_RESPONSE, type(error).__name__, str(error), was_sent=not isinstance(error, NOT_SENT_ERRORS))
