"""A real etcd and kube-apiserver on loopback for one test session. Tests can kill, restart and freeze the latter."""

from __future__ import annotations

import base64
import http.client
import json
import os
import shutil
import signal
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scheduler.kubernetes.api_objects import ResourceKind
from scheduler.kubernetes.client import KubernetesClient, connect
from tests.kubernetes.certificates import Authority
from tests.loopback import find_free_port

ASSETS = Path(os.environ.get("KUBEBUILDER_ASSETS", "/usr/local/kubebuilder/bin"))
BINARIES = ("etcd", "kube-apiserver")
START_S = 240.0
STOP_S = 30.0
ADMIN = "admin"
SERVICE_ACCOUNT = ResourceKind("", "v1", "ServiceAccount", "serviceaccounts")


def missing_binaries() -> list[str]:
    return [name for name in BINARIES if not os.access(ASSETS / name, os.X_OK)]


class ControlPlane:
    """etcd and API server. Call `start` before use and `close` afterwards."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority(folder / "pki")
        self.authority.sign_server("apiserver", "DNS:localhost", "IP:127.0.0.1", "IP:10.0.0.1")
        self.authority.sign_user(ADMIN, groups=("system:masters",))
        self.authority.make_signing_key("tokens")
        self.etcd_port, self.api_port, peer_port = find_free_port(), find_free_port(), find_free_port()
        self._etcd_peer = f"http://127.0.0.1:{peer_port}"
        self._etcd: subprocess.Popen[bytes] | None = None
        self._api: subprocess.Popen[bytes] | None = None
        self.admin_kubeconfig = self._write_kubeconfig(ADMIN, self._certified(ADMIN))

    def start(self) -> None:
        client = f"http://127.0.0.1:{self.etcd_port}"
        self._etcd = self._spawn(
            "etcd",
            "--name=test",
            f"--data-dir={self.folder / 'etcd'}",
            "--unsafe-no-fsync",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={self._etcd_peer}",
            f"--initial-advertise-peer-urls={self._etcd_peer}",
            f"--initial-cluster=test={self._etcd_peer}",
            "--log-level=warn",
        )
        self._await(self._etcd, self._etcd_is_healthy)
        self.start_api()

    def close(self) -> None:
        self.resume_api()
        for process in (self._api, self._etcd):
            if process is not None:
                _end(process, signal.SIGKILL)

    def start_api(self) -> None:
        """Start the API server and wait until it is ready."""
        issuer = "https://kubernetes.default.svc"
        self._api = self._spawn(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{self.etcd_port}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={self.api_port}",
            f"--tls-cert-file={self.authority.certificate('apiserver')}",
            f"--tls-private-key-file={self.authority.key('apiserver')}",
            f"--client-ca-file={self.authority.certificate('ca')}",
            "--authorization-mode=RBAC",
            f"--service-account-issuer={issuer}",
            f"--api-audiences={issuer}",
            f"--service-account-key-file={self.authority.certificate('tokens')}",
            f"--service-account-signing-key-file={self.authority.key('tokens')}",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--endpoint-reconciler-type=none",
            # No controller creates default service accounts here, and pods must not wait for them.
            "--disable-admission-plugins=ServiceAccount",
            "--profiling=false",
        )
        self._await(self._api, self._api_is_ready)

    def stop_api(self) -> None:
        """Stop the API server gracefully, as during an upgrade."""
        assert self._api is not None
        _end(self._api, signal.SIGTERM)

    def kill_api(self) -> None:
        assert self._api is not None
        _end(self._api, signal.SIGKILL)

    def pause_api(self) -> None:
        """Freeze the API server. Its connections stay open and silent."""
        assert self._api is not None
        self._api.send_signal(signal.SIGSTOP)

    def resume_api(self) -> None:
        if self._api is not None and self._api.poll() is None:
            self._api.send_signal(signal.SIGCONT)

    def revive_api(self) -> None:
        """Make the API server respond again, whatever a test did to it."""
        self.resume_api()
        if self._api is None or self._api.poll() is not None:
            self.start_api()

    def kubeconfig_of_user(self, name: str, *groups: str) -> Path:
        self.authority.sign_user(name, groups=groups)
        return self._write_kubeconfig(name, self._certified(name))

    def kubeconfig_of_service_account(self, name: str, namespace: str) -> Path:
        """Return a kubeconfig with a token for an existing ServiceAccount, valid for one hour."""
        admin = self.connect()
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
        answer = admin.post_subresource(SERVICE_ACCOUNT, name, namespace, subresource="token", body=body)
        admin.close()
        return self._write_kubeconfig(f"{namespace}-{name}", {"token": answer["status"]["token"]})

    def connect(self) -> KubernetesClient:
        """Return an admin client."""
        return connect(self.admin_kubeconfig)

    def etcd(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Call etcd's JSON gateway."""
        url = f"http://127.0.0.1:{self.etcd_port}/v3/{path}"
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=10) as answer:
            text: dict[str, Any] = json.load(answer)
        return text

    def forget_past(self) -> None:
        """Compact etcd and restart the API server with its watch cache, so that older versions have expired."""
        now = self.etcd("kv/range", {"key": "AA=="})["header"]["revision"]
        self.etcd("kv/compaction", {"revision": now, "physical": True})
        self.kill_api()
        self.start_api()

    def api_memory_bytes(self) -> int:
        """Return the resident memory of the API server."""
        assert self._api is not None
        pages = Path(f"/proc/{self._api.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def _spawn(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        # Even a killed test session must not leave a server behind.
        leash = ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen([*leash, str(ASSETS / name), *arguments], stdout=log, stderr=log)

    def _await(self, process: subprocess.Popen[bytes], is_up: Callable[[], bool]) -> None:
        limit_s = time.monotonic() + START_S
        while not is_up():
            assert process.poll() is None, f"it ended with {process.returncode}: see the logs in {self.folder}"
            assert time.monotonic() < limit_s, f"not up within {START_S} s: see the logs in {self.folder}"
            time.sleep(0.1)

    def _etcd_is_healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.etcd_port, timeout=5)
        return _answers(connection, "/health")

    def _api_is_ready(self) -> bool:
        trust = ssl.create_default_context(cafile=str(self.authority.certificate("ca")))
        trust.load_cert_chain(self.authority.certificate(ADMIN), self.authority.key(ADMIN))
        connection = http.client.HTTPSConnection("127.0.0.1", self.api_port, timeout=5, context=trust)
        return _answers(connection, "/readyz")

    def _certified(self, name: str) -> dict[str, str]:
        return {
            "client-certificate-data": _base64(self.authority.certificate(name)),
            "client-key-data": _base64(self.authority.key(name)),
        }

    def _write_kubeconfig(self, name: str, user: dict[str, str]) -> Path:
        server = {
            "server": f"https://127.0.0.1:{self.api_port}",
            "certificate-authority-data": _base64(self.authority.certificate("ca")),
        }
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": server}],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": name}}],
            "current-context": "test",
        }
        path = self.folder / f"{name}.kubeconfig"
        path.write_text(json.dumps(document))
        path.chmod(0o600)
        return path


def _answers(connection: http.client.HTTPConnection, path: str) -> bool:
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _end(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
    process.send_signal(how)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
