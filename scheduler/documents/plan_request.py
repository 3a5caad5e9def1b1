"""The plan request: input of the solver, as in `POST /v1/plans`."""

from __future__ import annotations

import json
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator

from scheduler.documents.document import (
    CAMEL_CASE,
    Document,
    InvalidDocumentError,
    InvalidField,
    Text,
    invalid_field,
    parse_document,
    to_printable,
)
from scheduler.documents.job import Batch, GpuCount, SequenceLength, require_finite_json
from scheduler.documents.plan_limits import PlanLimitsDocument
from scheduler.documents.units import Size
from scheduler.domain.framework_limits import FRAMEWORK_LIMITS
from scheduler.domain.gpu_sets import GpuGroup, GpuShape

GROUPS_MAX = 16
GPUS_PER_NODE = 8
"""Assumed GPUs per node if a request does not set `nodes`."""


class GroupDocument(Document):
    """`nodes` nodes that provide `gpusPerNode` GPUs of one model each."""

    model_config = CAMEL_CASE
    gpu: Text = Field(description="Profile name of the GPU model, such as h100-80g.")
    nodes: GpuCount = Field(description="Number of equal hosts.")
    gpus_per_node: GpuCount = Field(description="Number of GPUs that each of them provides.")


Groups = Annotated[list[GroupDocument], Field(min_length=1, max_length=GROUPS_MAX)]


class ShapeDocument(Document):
    """A shape of up to four GPU models."""

    groups: Groups


class PlanRequestDocument(Document):
    """Set either `gpu` and `gpus` (with `nodes`, or packed 8 per node) or `shape`, and either `model` or `profile`."""

    model_config = CAMEL_CASE
    model: Text = Field(default="", description="Name of a built-in model profile. Empty: `profile` is set.")
    profile: Annotated[dict[str, Any], AfterValidator(require_finite_json)] | None = Field(
        default=None,
        description="A model profile of your own or a Hugging Face `config.json`. Null: `model` is set.",
    )
    gpu: Text = Field(default="", description="Profile name of the GPU model, such as h100-80g. Empty: `shape` is set.")
    gpus: GpuCount | None = Field(default=None, description="Number of GPUs in total. Null: `shape` is set.")
    nodes: GpuCount | None = Field(
        default=None, description="Number of hosts that share `gpus` equally. Null: packed 8 per host."
    )
    shape: Groups | None = Field(default=None, description="Groups of equal nodes, of up to four GPU models.")
    global_batch: Batch = Field(description="Samples per optimizer step.")
    sequence_length: SequenceLength | None = Field(
        default=None, description="Tokens per sample. Default: that of the model."
    )
    frozen_layers: Annotated[int, Field(strict=True, ge=0)] = Field(
        default=0, description="Number of leading layers that are not trained, at most those of the model."
    )
    memory: Size | None = Field(
        default=None,
        description="Memory of one GPU that a plan may use, in bytes or as text such as 24GB. Default: all of it.",
    )
    host_memory: Size | None = Field(
        default=None,
        description="Memory of the host that a plan may use per GPU, in bytes or as text such as 60GB, above 0. "
        "Plans stream parameters and activations from it if nothing else fits. Default: that of the GPU profile, or no "
        "limit without one.",
    )
    tolerance: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="Stop when no plan can be faster by more than this fraction. 0 is exact."
    )
    alternatives: Annotated[int, Field(strict=True, ge=0, le=10)] = Field(
        default=0, description="Number of next-best plans to return, 0 to 10."
    )

    simplicity: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None,
        description="Also return the plan with the fewest different strategies whose step takes longer by at most this "
        "fraction. Null: only the fastest.",
    )
    limits: PlanLimitsDocument | None = Field(
        default=None, description="What the plan may use. Default: everything that the GPUs' worker supports."
    )

    framework: Text = Field(
        default="",
        description=f"Training framework that must be able to run the plan, in whose words it is returned: "
        f"{', '.join(f'`{name}`' for name in FRAMEWORK_LIMITS)}. Empty: none.",
    )

    @model_validator(mode="after")
    def _check_request(self) -> Self:
        if bool(self.model) == (self.profile is not None):
            raise invalid_field("model", self.model or None, "exactly one of model and profile")
        if self.framework and self.framework not in FRAMEWORK_LIMITS:
            raise invalid_field("framework", self.framework, f"one of {', '.join(FRAMEWORK_LIMITS)}")
        if self.framework and self.shape is not None and len({group.gpu for group in self.shape}) > 1:
            raise invalid_field("framework", self.framework, "nothing; no framework has plans on several GPU models")
        if self.shape is not None:
            for name in ("gpu", "gpus", "nodes"):
                if getattr(self, name):
                    raise invalid_field(name, getattr(self, name), "nothing; shape already sets it")
        elif not self.gpu or self.gpus is None:
            name = "gpus" if self.gpu else "gpu"
            raise invalid_field(name, None, "gpu and gpus, or shape instead")
        elif self.nodes is not None and self.gpus % self.nodes:
            raise invalid_field("nodes", self.nodes, f"a divisor of gpus ({self.gpus})")
        return self

    @property
    def profile_json(self) -> str:
        return "" if self.profile is None else json.dumps(self.profile, sort_keys=True)


def to_gpu_shape(document: PlanRequestDocument) -> GpuShape:
    """Return the shape of the request."""
    if document.shape is not None:
        return _build_shape(document.shape)
    assert document.gpus is not None, "validation requires gpus with gpu"
    if document.nodes is not None:
        return GpuShape((GpuGroup(document.gpu, document.nodes, document.gpus // document.nodes),))
    return GpuShape.packed(document.gpu, document.gpus, GPUS_PER_NODE)


def parse_gpu_shape(document: object) -> GpuShape:
    """Parse the shape in a file: `[{gpu, nodes, gpus_per_node}, ...]`, or the same list under `groups`.

    Raises:
        InvalidDocumentError: one or more fields are invalid.
    """
    groups = document.get("groups") if isinstance(document, dict) and set(document) == {"groups"} else document
    if not isinstance(groups, list):
        raise InvalidDocumentError(
            InvalidField("groups", to_printable(groups), "a list of {gpu, nodes, gpus_per_node}")
        )
    return _build_shape(parse_document(ShapeDocument, {"groups": [_to_camel_case(group) for group in groups]}).groups)


def _to_camel_case(group: object) -> object:
    """Accept `gpus_per_node`, the spelling of cluster files."""
    if not isinstance(group, dict) or "gpusPerNode" in group:
        return group
    return {"gpusPerNode" if name == "gpus_per_node" else name: value for name, value in group.items()}


def _build_shape(groups: list[GroupDocument]) -> GpuShape:
    found = (GpuGroup(group.gpu, group.nodes, group.gpus_per_node) for group in groups)
    return GpuShape(tuple(sorted(found, key=lambda group: (group.gpu, -group.gpus_per_node))))
