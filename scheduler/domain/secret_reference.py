"""References of a job to secrets: which secret, and where its ranks find the value. A reference holds no value."""

from __future__ import annotations

import re
from dataclasses import dataclass

FILE_FORM = "1 to 253 letters, digits, '.', '_' and '-', not starting with '.'"
SECRET_BYTES_MIN, SECRET_BYTES_MAX = 6, 65_536
"""Sizes of a value. Shorter ones cannot be masked in logs, and longer ones do not fit into an environment."""
KUBERNETES_SECRETS_DIR = "/var/run/secrets/ebbtide.dev-job"
"""Where a pod has the files of Kubernetes Secrets. The agent copies them to the folder of the ranks."""
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,252}", re.ASCII)


@dataclass(frozen=True, slots=True)
class KubernetesSecretKey:
    """A key of a Kubernetes Secret in the namespace of the job's pods."""

    name: str
    key: str


@dataclass(frozen=True, slots=True)
class SecretReference:
    """A secret of the job's queue, or a key of a Kubernetes Secret, and where its value appears.

    Args:
        name: secret of the queue; empty with `kubernetes`.
        env: environment variable of each rank that holds the value; empty with `file`.
        file: file that holds the value, in the folder `EBBTIDE_SECRETS_DIR` of each rank; empty with `env`.
    """

    name: str = ""
    kubernetes: KubernetesSecretKey | None = None
    env: str = ""
    file: str = ""

    def __post_init__(self) -> None:
        if bool(self.name) == (self.kubernetes is not None):
            raise ValueError("secrets: each needs either name or kubernetesSecret")
        if bool(self.env) == bool(self.file):
            raise ValueError("secrets: each needs either env or file")
        if self.file and (problem := find_file_problem(self.file)):
            raise ValueError(f"secrets: file is {self.file!r}; allowed: {problem}")


def find_file_problem(name: str) -> str | None:
    """Return what is accepted instead of `name`, or None if it is a valid file name."""
    return None if _FILE_NAME.fullmatch(name) else FILE_FORM
