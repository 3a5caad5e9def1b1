"""Checkpoints of a job: where they are kept, and a user's request for one."""

from __future__ import annotations

import re
from dataclasses import dataclass

_OBJECT_STORE_URL = re.compile(
    r"((s3|gs|az)://[A-Za-z0-9][A-Za-z0-9._-]*|abfss?://[A-Za-z0-9][A-Za-z0-9._-]*(@[A-Za-z0-9][A-Za-z0-9.-]*)?)"
    r"(/[^\s?#@]*)?",
    re.ASCII,
)
_LIKE_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|(s3|gs|az|abfss?):", re.ASCII)
_PARENT = re.compile(r"(^|/)\.\.(/|$)")
OBJECT_STORE_FORM = (
    "a directory, or a URL: s3://BUCKET/PATH, gs://BUCKET/PATH, az://CONTAINER/PATH or "
    "abfs[s]://CONTAINER@ACCOUNT/PATH, without credentials, query and '..'; set credentials in env or in the template"
)


CHECKPOINT_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")
CHECKPOINT_PATTERN_FORM = (
    "the path of a file or directory in checkpoint.dir, which must be a directory, such as ckpt.pt or checkpoint-*: "
    "relative, at most 1024 characters, with * and ? as wildcards, without '..' and '**'"
)
_PATTERN_LENGTH_MAX = 1024


def is_checkpoint_pattern(pattern: str) -> bool:
    """Return whether `pattern` is the relative path of checkpoints in their directory, perhaps with wildcards."""
    parts = pattern.split("/")
    return (
        0 < len(pattern) <= _PATTERN_LENGTH_MAX
        and "\0" not in pattern
        and all(part and part not in (".", "..") and "**" not in part for part in parts)
    )


def is_object_store(location: str) -> bool:
    """Return whether a checkpoint location is a URL of an object store, not a directory."""
    return "://" in location


def suggest_location(location: str) -> str:
    """Return a hint if the location names Google Cloud Storage by the scheme of other tools, else an empty string."""
    scheme, separator, path = location.partition("://")
    return f". Write gs://{path}" if separator and scheme.lower() == "gcs" else ""


def is_valid_location(location: str) -> bool:
    """Return whether a checkpoint location is a directory, or a well-formed URL of an object store."""
    if _LIKE_URL.match(location) is None:
        return True
    return _OBJECT_STORE_URL.fullmatch(location) is not None and _PARENT.search(location) is None


@dataclass(frozen=True, slots=True)
class CheckpointVolume:
    """Persistent volume claim for a job's checkpoints on Kubernetes, and the directory in it (empty: the job's id)."""

    claim: str
    sub_path: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointSpec:
    """Location, interval and number of checkpoints.

    `dir` is a directory or the URL of an object store; empty means a directory that the executor chooses. `volume` is
    mounted there in each pod of the job.

    A script that knows nothing of Ebbtide saves by itself: on the signal `signal` (empty: at intervals of its own), as
    a file or directory that matches the pattern `path` in `dir`.
    """

    dir: str = ""
    interval_s: float = 900.0
    keep: int = 2
    volume: CheckpointVolume | None = None
    path: str = ""
    signal: str = ""

    def __post_init__(self) -> None:
        if self.path and (is_object_store(self.dir) or not is_checkpoint_pattern(self.path)):
            raise ValueError(f"checkpoint.path must be {CHECKPOINT_PATTERN_FORM}, got {self.path!r}")
        if self.signal and self.signal not in CHECKPOINT_SIGNALS:
            raise ValueError(f"checkpoint.signal must be one of {', '.join(CHECKPOINT_SIGNALS)}, got {self.signal!r}")
        if self.signal and not self.path:
            raise ValueError(f"checkpoint.signal is {self.signal}; set checkpoint.path to what the script then writes")
        if not self.interval_s > 0:
            raise ValueError(f"checkpoint.interval must be above 0 s, got {self.interval_s}")
        if self.keep < 1:
            raise ValueError(f"checkpoint.keep must be at least 1, got {self.keep}")


DEFAULT_CHECKPOINT = CheckpointSpec()


@dataclass(frozen=True, slots=True)
class CheckpointRequest:
    """A user's request that the workers of `generation` save a checkpoint now.

    `steps` is the number of steps done when the request was first observed, at least 1, or None before that. A
    checkpoint of at least that many steps fulfils it.
    """

    asked_at_s: float
    generation: int
    steps: float | None = None
