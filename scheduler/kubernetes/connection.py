"""HTTP connection to an API server: configuration, authentication, single requests and streams.

This is the only module that imports `kubernetes` and `urllib3`.
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
    """No Kubernetes cluster is configured, or the configuration is invalid."""


class ResponseLines:
    """The lines of a streaming response. One thread iterates; any thread can call `close`, which ends the iteration."""

    def __init__(self, response: urllib3.HTTPResponse) -> None:
        self._response = response
        self._closed = threading.Event()

    def __iter__(self) -> Iterator[bytes]:
        """Yield lines. Raises ApiError if the connection breaks or is idle for longer than the read timeout."""
        rest = b""
        try:
            for chunk in self._response.stream(CHUNK_BYTES, decode_content=True):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from filter(None, lines)
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            # A closed socket fails the reader in many ways. After our own close, none of them is an error.
            if not self._closed.is_set():
                raise _no_response_error(error) from error
        finally:
            self._response.close()

    def close(self) -> None:
        self._closed.set()
        try:
            self._response.shutdown()
        except (ValueError, RuntimeError, OSError):
            return  # the response had already ended


class Connection:
    """A pool of connections to one API server. Thread-safe."""

    def __init__(self, configuration: Configuration, *, connect_timeout_s: float, read_timeout_s: float) -> None:
        configuration.connection_pool_maxsize = CONNECTIONS_MAX
        configuration.keep_alive = True
        # Retries happen in flow_control, which knows the deadline and which requests are idempotent.
        configuration.retries = False
        self._configuration = configuration
        self._connect_timeout_s = connect_timeout_s
        self._read_timeout_s = read_timeout_s
        self._rest_client: Any = ApiClient(configuration).rest_client
        self._auth_lock = threading.Lock()

    @property
    def host(self) -> str:
        return str(self._configuration.host)

    def send(self, request: ApiRequest) -> Any:
        """Return the response's JSON. Raises ApiError."""
        try:
            response = self._request(request, read_timeout_s=self._read_timeout_s)
            body = response.read()
        except (urllib3.exceptions.HTTPError, ApiException) as error:
            raise _no_response_error(error) from error
        if not 200 <= response.status < 300:
            raise parse_error_response(response.status, response.headers, body)
        try:
            return json.loads(body)
        except ValueError as error:
            raise _no_response_error(error) from error

    def stream(self, request: ApiRequest, *, idle_timeout_s: float) -> ResponseLines:
        """Return the lines of a streaming response; `idle_timeout_s` without data is an error. Raises ApiError."""
        try:
            response = self._request(request, read_timeout_s=idle_timeout_s)
            if 200 <= response.status < 300:
                return ResponseLines(response.response)
            body = response.read()
        except (urllib3.exceptions.HTTPError, ApiException) as error:
            raise _no_response_error(error) from error
        raise parse_error_response(response.status, response.headers, body)

    def close(self) -> None:
        self._rest_client.close()

    def _request(self, request: ApiRequest, *, read_timeout_s: float) -> Any:
        headers = {"Accept": "application/json", "User-Agent": "ebbtide", **self._authorization()}
        if request.body is not None:
            headers["Content-Type"] = request.content_type
        target = f"{request.path}?{urlencode(request.query)}" if request.query else request.path
        return self._rest_client.request(
            request.method,
            self.host + target,
            headers=headers,
            body=request.body,
            _request_timeout=(self._connect_timeout_s, read_timeout_s),
        )

    def _authorization(self) -> dict[str, str]:
        """Return the authorization header. Read for each request, because token files and plugin tokens rotate."""
        with self._auth_lock:
            token = self._configuration.get_api_key_with_prefix("BearerToken")
        return {"Authorization": token.strip()} if token else {}


def load_configuration(kubeconfig: str | Path = "") -> Configuration:
    """Load the configuration from the given file, else from KUBECONFIG, else from the pod's service account."""
    configuration = Configuration()
    path = str(kubeconfig) or os.environ.get("KUBECONFIG", "")
    try:
        if path:
            load_kube_config(  # type: ignore[no-untyped-call]  # untyped in kubernetes
                path, client_configuration=configuration, persist_config=False
            )
        else:
            load_incluster_config(  # type: ignore[no-untyped-call]  # untyped in kubernetes
                client_configuration=configuration
            )
    except (ConfigException, OSError, TypeError, ValueError, yaml.YAMLError) as error:
        if path:
            raise NoClusterError(f"kubeconfig {path!r} is invalid: {error}") from error
        raise NoClusterError(
            f"no Kubernetes cluster is configured: set KUBECONFIG or run in a pod with a service account: {error}"
        ) from error
    return configuration


def _no_response_error(error: Exception) -> ApiError:
    return ApiError(NO_RESPONSE, type(error).__name__, str(error), was_sent=not isinstance(error, NOT_SENT_ERRORS))
