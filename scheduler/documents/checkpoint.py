"""Where a job's checkpoints go: a folder, and on Kubernetes the volume that all its pods mount there."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from scheduler.documents.document import Document
from scheduler.documents.fields import CAMEL, Text
from scheduler.documents.pod_template import CHECKPOINT_DIR, OUR_DIRS, SHM_DIR, first_mounts
from scheduler.documents.refusal import refused_field
from scheduler.documents.units import PositiveDuration
from scheduler.domain.job import CheckpointSpec, CheckpointVolume

_CLAIM = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", re.ASCII)
_CLAIM_FORM = "1 to 253 of a-z, 0-9, '-' and '.', beginning and ending with a letter or digit"
_TAKEN = (*OUR_DIRS, SHM_DIR)


def _claim_name(name: str) -> str:
    if not _CLAIM.fullmatch(name):
        raise PydanticCustomError("name", "Input should be {form}", {"form": _CLAIM_FORM})
    return name


def _inside(path: str) -> str:
    if path.startswith("/") or ".." in path.split("/"):
        raise PydanticCustomError("path", "Input should be a path in the volume: relative, without '..'")
    return path


class ClaimDocument(Document):
    model_config = CAMEL
    claim_name: Annotated[str, Field(description=_CLAIM_FORM), AfterValidator(_claim_name)]


class VolumeDocument(Document):
    """A persistent volume claim of the job's namespace, already bound, that all nodes can mount at once. Other kinds of
    volumes are for `template`: nfs and hostPath, which restricted namespaces forbid, and what lives with one pod."""

    model_config = CAMEL
    persistent_volume_claim: ClaimDocument
    sub_path: Annotated[Text, Field(min_length=1, max_length=1024), AfterValidator(_inside)] | None = Field(
        default=None, description="Folder in it; absent: one named by the job's id, so that jobs may share the claim."
    )


class CheckpointDocument(Document):
    """Where checkpoints go (empty: a folder that the executor chooses), how often, and how many are kept. `volume` is
    mounted there in the job's pods; without one, or one of the template's, checkpoints live and die with each pod."""

    model_config = CAMEL
    dir: Text = ""
    interval: PositiveDuration = 900.0
    keep: Annotated[int, Field(strict=True, ge=1, le=1000)] = 2
    volume: VolumeDocument | None = None

    @model_validator(mode="after")
    def _can_be_mounted(self) -> Self:
        if self.volume is not None and self.dir and not _is_mount_path(self.dir):
            taken = ", ".join(_TAKEN)
            allowed = f"an absolute path without ':' and '..', none of /, {taken}: checkpoint.volume is mounted there"
            raise refused_field("dir", self.dir, allowed)
        return self


def check_mount(checkpoint: CheckpointDocument, template: Mapping[str, Any]) -> None:
    """For the validator of a job: nothing can be mounted twice at one place.

    Raises:
        PydanticCustomError: the template's first container has a volume where `checkpoint.volume` is to be.
    """
    place = posixpath.normpath(checkpoint.dir or CHECKPOINT_DIR)
    if checkpoint.volume is not None and place in first_mounts(template):
        claim = checkpoint.volume.persistent_volume_claim.claim_name
        raise refused_field(
            "checkpoint.volume", claim, f"nothing: the template mounts {first_mounts(template)[place]} at {place}"
        )


def checkpoint_spec(document: CheckpointDocument) -> CheckpointSpec:
    """The domain's form of it.

    Raises:
        ValueError: the domain refuses what the form let through.
    """
    given = document.volume
    volume = None if given is None else CheckpointVolume(given.persistent_volume_claim.claim_name, given.sub_path or "")
    return CheckpointSpec(document.dir, document.interval, document.keep, volume)


def checkpoint_document(checkpoint: CheckpointSpec) -> dict[str, Any]:
    """The document that reads as `checkpoint`, in plain JSON values."""
    document: dict[str, Any] = {"dir": checkpoint.dir, "interval": checkpoint.interval_s, "keep": checkpoint.keep}
    if checkpoint.volume is None:
        return document
    folder = {"subPath": checkpoint.volume.sub_path} if checkpoint.volume.sub_path else {}
    return {**document, "volume": {"persistentVolumeClaim": {"claimName": checkpoint.volume.claim}, **folder}}


def _is_mount_path(path: str) -> bool:
    plain = posixpath.normpath(path)
    return path.startswith("/") and ".." not in path.split("/") and ":" not in path and plain not in ("/", *_TAKEN)
