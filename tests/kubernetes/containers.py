"""Containers that really run: the first container of each fake pod, as a process of this machine.

A container gets the variables of its spec and image, volumes as folders, SIGTERM when its pod is deleted, and SIGKILL
for all its processes after the grace period. It has no root file system: a variable that begins with a mount path gets
the real folder instead, and the interpreter of the tests stands for that of the agent's bundle.
"""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from scheduler.domain.agent_bundle import BUNDLE_PYTHON
from scheduler.kubernetes.api_objects import CONFIG_MAP, SECRET, Object, name_of, namespace_of, uid_of
from scheduler.kubernetes.client import KubernetesClient
from tests.kubernetes.fake_kubelet import FakeKubelet
from tests.processes import find_run_processes, kill_tree

ROOT = Path(__file__).parents[2]
IMAGE = {
    "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
    "PYTHONPATH": str(ROOT),
    "PYTHONUNBUFFERED": "1",
    "HOME": "/tmp",
}
"""Environment set by deploy/worker.Dockerfile."""


@dataclass(frozen=True)
class Container:
    """A running container. `log` is the file that `kubectl logs` would show."""

    pod: str
    process: subprocess.Popen[bytes]
    log: Path
    folder: Path


class Containers:
    """Containers by pod uid, ended ones included. `folder` holds logs and volumes."""

    def __init__(self, cluster: KubernetesClient, kubelet: FakeKubelet, folder: Path) -> None:
        self._cluster = cluster
        self._kubelet = kubelet
        self._folder = folder
        self._started: dict[str, Container] = {}
        self._waiting: list[threading.Thread] = []
        kubelet.on_start, kubelet.on_stop, kubelet.on_kill = self._start, self._tell_to_stop, self._kill
        kubelet.stop_s = self._stop_s

    def of(self, pod: Object) -> Container:
        return self._started[uid_of(pod)]

    def logs(self) -> dict[str, str]:
        """Return the logs by pod name."""
        return {each.pod: each.log.read_text() for each in self._started.values()}

    def exit_codes(self) -> dict[str, int | None]:
        return {each.pod: each.process.poll() for each in self._started.values()}

    def left(self) -> list[psutil.Process]:
        """Return the live processes of all containers."""
        living = [psutil.Process(each.process.pid) for each in self._started.values() if each.process.poll() is None]
        ranks = (find_run_processes(path) for each in self._started.values() for path in each.folder.iterdir())
        return [*living, *(process for some in ranks for process in some)]

    def kill(self, pod: Object) -> None:
        """Kill all processes of a container, as the end of its first process does."""
        kill_tree(self.of(pod).process)

    def find_agent(self, pod: Object) -> psutil.Process:
        """Return the process of the agent in a pod."""
        children = psutil.Process(self.of(pod).process.pid).children()
        return next(child for child in children if "scheduler.agent.pod_daemon" in child.cmdline())

    def close(self) -> None:
        for container in self._started.values():
            kill_tree(container.process)
        for thread in self._waiting:
            thread.join()

    def _start(self, pod: Object) -> None:
        container = pod["spec"]["containers"][0]
        folder = self._folder / uid_of(pod)
        mounts = dict(self._mounts(pod, container, folder))
        env = {**IMAGE, **{each["name"]: self._value(pod, each) for each in container.get("env", ())}}
        env = {name: _on_this_machine(value, mounts) for name, value in env.items()}
        log = self._folder / f"{name_of(pod)}.log"
        with log.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable if word == BUNDLE_PYTHON else word for word in container["command"]],
                env=env,
                cwd="/tmp",
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self._started[uid_of(pod)] = Container(name_of(pod), process, log, folder)
        thread = threading.Thread(target=self._wait, args=(pod, process), daemon=True)
        thread.start()
        self._waiting.append(thread)

    def _wait(self, pod: Object, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        self._kubelet.finish(pod, code if code >= 0 else 128 - code)

    def _stop_s(self, pod: Object) -> float:
        container = self._started.get(uid_of(pod))
        return 0.0 if container is None or container.process.poll() is not None else float("inf")

    def _tell_to_stop(self, pod: Object) -> None:
        container = self._started.get(uid_of(pod))
        if container is not None and container.process.poll() is None:
            container.process.send_signal(signal.SIGTERM)

    def _kill(self, pod: Object) -> None:
        kill_tree(self._started[uid_of(pod)].process)

    def _mounts(self, pod: Object, container: Object, folder: Path) -> Iterator[tuple[str, Path]]:
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", ())}
        for mount in container.get("volumeMounts", ()):
            yield mount["mountPath"], self._volume(pod, volumes[mount["name"]], folder / mount["name"])

    def _volume(self, pod: Object, volume: Object, folder: Path) -> Path:
        if host := volume.get("hostPath"):
            return Path(host["path"])
        folder.mkdir(parents=True)
        if secret := volume.get("secret"):
            found = self._cluster.get(SECRET, secret["secretName"], namespace_of(pod))
            for name, value in found["data"].items():
                path = folder / name
                path.write_bytes(base64.b64decode(value))
                path.chmod(secret["defaultMode"])
        elif named := volume.get("configMap"):
            data = self._cluster.get(CONFIG_MAP, named["name"], namespace_of(pod))["data"]
            for name, text in data.items():
                (folder / name).write_text(text)
        else:
            assert "emptyDir" in volume, f"no volumes of this kind here: {volume}"
        return folder

    def _value(self, pod: Object, variable: Object) -> str:
        if "valueFrom" not in variable:
            return str(variable["value"])
        ((source, chosen),) = variable["valueFrom"].items()
        match source:
            case "fieldRef":
                found: Object | str = pod
                for part in chosen["fieldPath"].split("."):
                    assert isinstance(found, dict), chosen
                    found = found[part]
                return str(found)
            case "secretKeyRef":
                secret = self._cluster.get(SECRET, chosen["name"], namespace_of(pod))
                return base64.b64decode(secret["data"][chosen["key"]]).decode()
            case "configMapKeyRef":
                return str(self._cluster.get(CONFIG_MAP, chosen["name"], namespace_of(pod))["data"][chosen["key"]])
        raise AssertionError(f"no variables from {source} here")


def _on_this_machine(value: str, mounts: dict[str, Path]) -> str:
    inside = (path for path in mounts if value == path or value.startswith(f"{path}/"))
    mount = max(inside, key=len, default=None)
    return value if mount is None else os.fspath(mounts[mount]) + value.removeprefix(mount)
