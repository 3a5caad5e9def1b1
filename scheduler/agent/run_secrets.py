"""Values of secrets on a machine: written for one run, in memory where possible, and deleted after it.

<root>/<run>/environment.json    values of environment variables, for the supervisor
<root>/<run>/files/<name>        values of files, mode 0400, owned by the ranks' user

The root is a folder of the agent in /dev/shm. Where that is no memory, it is `secrets` in the agent's state folder.
"""

from __future__ import annotations

import base64
import json
import os
import stat
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Protocol
from urllib.parse import quote, urlencode

from scheduler.agent.control_plane_identity import ControlPlaneIdentity
from scheduler.agent.folder_removal import delete_folder
from scheduler.agent.run_folder import RunFolder
from scheduler.agent.secret_masking import SecretMask, scrub_file
from scheduler.domain.run_document import RunDocument
from scheduler.domain.secret_reference import KUBERNETES_SECRETS_DIR, SecretReference

MEMORY = Path("/dev/shm")
_KUBERNETES_DIR = Path(KUBERNETES_SECRETS_DIR)
_MEMORY_TYPES = ("tmpfs", "ramfs")
_FETCH_TIMEOUT_S = 10.0
_FETCH_ATTEMPTS, _FETCH_PAUSE_S = 5, 0.5
_RETRIED = (409, 429, 500, 502, 503, 504)
_DETAIL_LENGTH_MAX = 300


class SecretsError(ValueError):
    """A run cannot get its secrets. The message names them and never contains a value."""


class FileOwner(Protocol):
    """The user and the group of the ranks."""

    @property
    def uid(self) -> int: ...

    @property
    def gid(self) -> int: ...


@dataclass(frozen=True, slots=True)
class SecretsFolder:
    """The folder with the secrets of one run."""

    path: Path

    @classmethod
    def of(cls, folder: RunFolder) -> SecretsFolder:
        """Return the folder of a run, which need not exist."""
        state = folder.path.parents[2]
        name = sha256(str(folder.path).encode()).hexdigest()[:24]
        in_memory = MEMORY / f"ebbtide-secrets-{os.geteuid()}-{sha256(str(state).encode()).hexdigest()[:12]}"
        root = in_memory if _is_memory(MEMORY) and _is_own_or_missing(in_memory) else state / "secrets"
        return cls(root / name)

    @property
    def environment_path(self) -> Path:
        return self.path / "environment.json"

    @property
    def files_path(self) -> Path:
        return self.path / "files"

    def write(self, references: Sequence[SecretReference], values: Mapping[str, bytes], user: FileOwner | None) -> None:
        """Write the values by name of the secret. Those of Kubernetes are taken from the pod.

        Raises:
            SecretsError: a value is missing, or cannot be an environment variable.
            OSError: the folder cannot be written.
        """
        self.delete()
        self.path.parent.mkdir(mode=0o711, exist_ok=True)
        self.path.parent.chmod(0o711)  # whatever the umask is
        self.path.mkdir(mode=0o711)
        self.path.chmod(0o711)
        self.files_path.mkdir(mode=0o700)
        environment = dict[str, str]()
        for reference in references:
            value = _find_value(reference, values)
            if reference.env:
                environment[reference.env] = _to_variable(reference, value)
            else:
                _write_private(self.files_path / reference.file, value, user)
        _write_private(self.environment_path, json.dumps(environment).encode(), None)
        if user is not None:
            os.chown(self.files_path, user.uid, user.gid)
        self.files_path.chmod(0o500)

    def read_values(self) -> list[bytes] | None:
        """Return all values, or None if the folder does not exist."""
        try:
            environment = json.loads(self.environment_path.read_bytes())
            files = [path.read_bytes() for path in self.files_path.iterdir()]
        except OSError:
            return None
        return [*(value.encode() for value in environment.values()), *files]

    def delete(self) -> None:
        """Delete the values. Raises OSError if they cannot be deleted."""
        delete_folder(self.path)
        with suppress(OSError):  # it has other runs, or does not exist
            self.path.parent.rmdir()


def fetch_secrets(identity: ControlPlaneIdentity, document: RunDocument) -> dict[str, bytes]:
    """Return the values of the secrets that the control plane stores for this run, by name.

    Raises:
        SecretsError: the control plane refuses, or does not answer.
    """
    if not any(reference.name for reference in document.secrets):
        return {}
    query = urlencode({"node": document.node, "generation": document.generation})
    url = f"{identity.url}/v1/jobs/{quote(document.job_id, safe='')}/secrets?{query}"
    problem = ""
    for attempt in range(_FETCH_ATTEMPTS):
        time.sleep(_FETCH_PAUSE_S * attempt)  # the process that answers may not know the newest decision yet
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {identity.read_token()}"})
        try:
            with urllib.request.urlopen(request, timeout=_FETCH_TIMEOUT_S) as reply:
                values: Mapping[str, str] = json.load(reply)["values"]
            return {name: base64.b64decode(value) for name, value in values.items()}
        except urllib.error.HTTPError as error:
            problem = _read_detail(error)
            if error.code not in _RETRIED:
                break
        except (OSError, ValueError) as error:
            problem = str(error)
    raise SecretsError(f"its secrets cannot be fetched: {problem}")


def find_mask(folder: RunFolder, document: RunDocument) -> SecretMask | None:
    """Return the mask of a run's output, or None if nothing must be masked: logs of settled runs were scrubbed."""
    if not document.secrets or folder.is_settled:
        return None
    values = SecretsFolder.of(folder).read_values()
    return SecretMask(()) if values is None else SecretMask.of(values)


def discard_secrets(folder: RunFolder, document: RunDocument) -> None:
    """Mask the values in the logs of an ended run, then delete them.

    Raises:
        OSError: a file cannot be changed.
    """
    mask = find_mask(folder, document)
    if mask is None:
        return
    for seat in document.ranks:
        scrub_file(folder.log_path(seat.rank), mask)
    SecretsFolder.of(folder).delete()


def _find_value(reference: SecretReference, values: Mapping[str, bytes]) -> bytes:
    if reference.kubernetes is None:
        if reference.name not in values:
            raise SecretsError(f"secret {reference.name} does not exist in the queue of the job. Set it")
        return values[reference.name]
    found = _read_kubernetes_value(reference)
    if found is None:
        key = f"{reference.kubernetes.name}/{reference.kubernetes.key}"
        raise SecretsError(f"kubernetesSecret {key} is not in this pod. Such secrets need a job in pods")
    return found


def _read_kubernetes_value(reference: SecretReference) -> bytes | None:
    """Return what the kubelet has put into the pod of this agent."""
    if reference.env:
        return os.environb.get(reference.env.encode())
    try:
        return (_KUBERNETES_DIR / reference.file).read_bytes()
    except OSError:
        return None


def _to_variable(reference: SecretReference, value: bytes) -> str:
    try:
        text = value.decode()
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        name = reference.name or reference.env
        raise SecretsError(f"secret {name} is no text, so it cannot be the variable {reference.env}. Use `file`")
    return text


def _write_private(path: Path, data: bytes, user: FileOwner | None) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o400)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fchmod(descriptor, 0o400)
        if user is not None:
            os.fchown(descriptor, user.uid, user.gid)


def _read_detail(error: urllib.error.HTTPError) -> str:
    with error:
        try:
            return str(json.load(error)["detail"])[:_DETAIL_LENGTH_MAX]
        except (ValueError, KeyError, TypeError, OSError):
            return f"status {error.code}"


def _is_memory(path: Path) -> bool:
    """Return whether a file system in memory is mounted there, and can be written."""
    return any(place == str(path) and kind in _MEMORY_TYPES for place, kind in _list_mounts()) and os.access(
        path, os.W_OK | os.X_OK
    )


def _list_mounts() -> Iterator[tuple[str, str]]:
    with suppress(OSError):
        for line in Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines():
            words = line.split(" ")
            yield words[1], words[2]


def _is_own_or_missing(path: Path) -> bool:
    """Return whether nobody else has created something there: everybody may write to /dev/shm."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return True
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
