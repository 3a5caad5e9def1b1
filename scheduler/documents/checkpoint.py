"""Checkpoints in the job document: directory, interval, number, and the volume that holds them."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from scheduler.documents.document import CAMEL_CASE, Document, Text, invalid_field
from scheduler.documents.pod_template import CHECKPOINT_DIR, RESERVED_DIRS, SHM_DIR, first_container_mounts
from scheduler.documents.units import PositiveDuration
from scheduler.domain.checkpoints import (
    CHECKPOINT_PATTERN_FORM,
    CHECKPOINT_SIGNALS,
    OBJECT_STORE_FORM,
    CheckpointSpec,
    CheckpointVolume,
    is_checkpoint_pattern,
    is_object_store,
    is_valid_location,
    suggest_location,
)

_CLAIM_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", re.ASCII)
_CLAIM_NAME_FORM = "1 to 253 characters of a-z, 0-9, '-' and '.', starting and ending with a letter or digit"
REFERENCE_TRAINER = "scheduler.trainer.train"
_RESERVED_PATHS = (*RESERVED_DIRS, SHM_DIR)


def _check_claim_name(name: str) -> str:
    if not _CLAIM_NAME.fullmatch(name):
        raise PydanticCustomError("name", "Input should be {form}", {"form": _CLAIM_NAME_FORM})
    return name


def _check_relative_path(path: str) -> str:
    if path.startswith("/") or ".." in path.split("/"):
        raise PydanticCustomError("path", "Input should be a relative path in the volume, without '..'")
    return path


def _check_pattern(pattern: str) -> str:
    if not is_checkpoint_pattern(pattern):
        raise PydanticCustomError("path", "Input should be {form}", {"form": CHECKPOINT_PATTERN_FORM})
    return pattern


def _check_signal(name: str) -> str:
    if name not in CHECKPOINT_SIGNALS:
        raise PydanticCustomError("signal", "Input should be {form}", {"form": ", ".join(CHECKPOINT_SIGNALS)})
    return name


class ClaimDocument(Document):
    model_config = CAMEL_CASE
    claim_name: Annotated[str, AfterValidator(_check_claim_name)] = Field(
        description=f"Name of the claim in the job's namespace: {_CLAIM_NAME_FORM}."
    )


class VolumeDocument(Document):
    """A bound persistent volume claim in the job's namespace that all nodes can mount at once.

    Other kinds of volumes belong in `template`.
    """

    model_config = CAMEL_CASE
    persistent_volume_claim: ClaimDocument = Field(description="The claim to mount in all pods of the job.")
    sub_path: Annotated[Text, Field(min_length=1, max_length=1024), AfterValidator(_check_relative_path)] | None = (
        Field(
            default=None,
            description="Directory in the volume. Default: the job's id, so that several jobs can share a claim.",
        )
    )


class CheckpointDocument(Document):
    """Location, interval and number of checkpoints.

    `volume` is mounted at `dir` in the job's pods. Without a volume here or in `template`, checkpoints are lost with
    each pod, unless `dir` is the URL of an object store, to which the script itself saves.
    """

    model_config = CAMEL_CASE
    dir: Text = Field(
        default="",
        description="Directory for checkpoints, or the URL of an object store to which the script itself saves: "
        "`s3://BUCKET/PATH`, `gs://`, `az://` or `abfs[s]://`. Default: a directory that the executor chooses.",
    )
    interval: PositiveDuration = Field(
        default=900.0, description="Time between two checkpoints, in seconds or as text such as 15m."
    )
    keep: Annotated[int, Field(strict=True, ge=1, le=1000)] = Field(
        default=2, description="Number of checkpoints to keep, the newest."
    )
    volume: VolumeDocument | None = Field(
        default=None, description="Kubernetes volume to mount at `dir` in all pods. Default: none."
    )
    path: Annotated[str, AfterValidator(_check_pattern)] | None = Field(
        default=None,
        description="For a script without Ebbtide's library: the file or directory in `dir` that it saves to, such as "
        "`ckpt.pt` or `checkpoint-*`. The command finds `dir` as `{checkpoint_dir}`. Default: none.",
    )
    signal: Annotated[str, AfterValidator(_check_signal)] | None = Field(
        default=None,
        description="Signal on which such a script saves: SIGTERM, SIGINT, SIGHUP, SIGUSR1 or SIGUSR2. Default: none; "
        "the script saves at intervals, and `interval` is the longest.",
    )

    @model_validator(mode="after")
    def _check_script_checkpoints(self) -> Self:
        if self.path is not None and is_object_store(self.dir):
            raise invalid_field("path", self.path, CHECKPOINT_PATTERN_FORM)
        if self.signal is not None and self.path is None:
            raise invalid_field("signal", self.signal, "nothing without checkpoint.path, which the script then writes")
        return self

    @model_validator(mode="after")
    def _check_location(self) -> Self:
        if not is_valid_location(self.dir):
            shown = _hide_credentials(self.dir)
            raise invalid_field("dir", shown, OBJECT_STORE_FORM + suggest_location(shown))
        if self.volume is not None and is_object_store(self.dir):
            claim = self.volume.persistent_volume_claim.claim_name
            raise invalid_field("volume", claim, f"nothing; checkpoint.dir is {self.dir}, which needs no volume")
        return self

    @model_validator(mode="after")
    def _check_mount_path(self) -> Self:
        if self.volume is not None and self.dir and not _is_mount_path(self.dir):
            reserved = ", ".join(_RESERVED_PATHS)
            allowed = (
                f"an absolute path without ':' and '..', other than /, {reserved}; checkpoint.volume is mounted there"
            )
            raise invalid_field("dir", self.dir, allowed)
        return self


def check_trainer_location(checkpoint: CheckpointDocument, command: Sequence[str]) -> None:
    """Check that the reference trainer, which writes folders only, is not given the URL of an object store.

    Raises:
        PydanticCustomError: it is.
    """
    if is_object_store(checkpoint.dir) and REFERENCE_TRAINER in command:
        allowed = (
            f"a directory; {REFERENCE_TRAINER} writes folders only. Mount the bucket as a volume, or run a script that "
            "saves to the URL"
        )
        raise invalid_field("checkpoint.dir", checkpoint.dir, allowed)


def check_checkpoint_mount(checkpoint: CheckpointDocument, template: Mapping[str, Any]) -> None:
    """Check that the template mounts nothing at the checkpoint directory if `checkpoint.volume` is set.

    Raises:
        PydanticCustomError: the template's first container mounts a volume there.
    """
    place = posixpath.normpath(checkpoint.dir or CHECKPOINT_DIR)
    if checkpoint.volume is not None and place in first_container_mounts(template):
        claim = checkpoint.volume.persistent_volume_claim.claim_name
        raise invalid_field(
            "checkpoint.volume",
            claim,
            f"nothing; the template mounts {first_container_mounts(template)[place]} at {place}",
        )


def to_checkpoint_spec(document: CheckpointDocument) -> CheckpointSpec:
    """Convert the document.

    Raises:
        ValueError: checkpointSpec rejects a value.
    """
    given = document.volume
    volume = None if given is None else CheckpointVolume(given.persistent_volume_claim.claim_name, given.sub_path or "")
    return CheckpointSpec(
        document.dir, document.interval, document.keep, volume, document.path or "", document.signal or ""
    )


def to_checkpoint_document(checkpoint: CheckpointSpec) -> dict[str, Any]:
    """Return the document of `checkpoint`, in plain JSON values."""
    document: dict[str, Any] = {"dir": checkpoint.dir, "interval": checkpoint.interval_s, "keep": checkpoint.keep}
    document |= {name: value for name in ("path", "signal") if (value := getattr(checkpoint, name))}
    if checkpoint.volume is None:
        return document
    folder = {"subPath": checkpoint.volume.sub_path} if checkpoint.volume.sub_path else {}
    return {**document, "volume": {"persistentVolumeClaim": {"claimName": checkpoint.volume.claim}, **folder}}


def _hide_credentials(url: str) -> str:
    """Return the URL without what precedes an @ in its host, so that no message repeats a password."""
    return re.sub(r"//[^/@]*:[^/@]*@", "//***@", url)


def _is_mount_path(path: str) -> bool:
    plain = posixpath.normpath(path)
    return (
        path.startswith("/")
        and ".." not in path.split("/")
        and ":" not in path
        and plain not in ("/", *_RESERVED_PATHS)
    )
