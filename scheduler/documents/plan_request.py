"""The plan request: one question to the solver, as `POST /v1/plans` takes it."""

from __future__ import annotations

import json
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator

from scheduler.documents.document import Document
from scheduler.documents.job import CAMEL, Batch, GpuCount, SequenceLength, Text, finite_json
from scheduler.documents.refusal import refused_field
from scheduler.documents.units import Size
from scheduler.domain.gpu_shape import GpuGroup, GpuShape

GPUS_PER_NODE = 8
"""How GPUs are taken to be packed where a request does not say on how many nodes they are."""


class GroupDocument(Document):
    """`nodes` equal hosts that give `gpusPerNode` GPUs of one model each."""

    model_config = CAMEL
    gpu: Text
    nodes: GpuCount
    gpus_per_node: GpuCount


class PlanRequestDocument(Document):
    """Either `gpu` and `gpus` (with `nodes`, or packed 8 to a node), or `shape`. Either `model` or `profile`."""

    model_config = CAMEL
    model: Text = ""
    profile: Annotated[dict[str, Any], AfterValidator(finite_json)] | None = None
    gpu: Text = ""
    gpus: GpuCount | None = None
    nodes: GpuCount | None = None
    shape: Annotated[list[GroupDocument], Field(min_length=1, max_length=2)] | None = None
    global_batch: Batch
    sequence_length: SequenceLength | None = Field(default=None, description="Absent: the model's own.")
    memory: Size | None = Field(default=None, description="What a plan may take of one GPU; absent: all it has.")

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if bool(self.model) == (self.profile is not None):
            raise refused_field("model", self.model or None, "exactly one of model and profile")
        if self.shape is not None:
            for name in ("gpu", "gpus", "nodes"):
                if getattr(self, name):
                    raise refused_field(name, getattr(self, name), "nothing beside shape, which says it already")
        elif not self.gpu or self.gpus is None:
            name = "gpus" if self.gpu else "gpu"
            raise refused_field(name, None, "gpu and gpus, or shape in their place")
        elif self.nodes is not None and self.gpus % self.nodes:
            raise refused_field("nodes", self.nodes, f"a divisor of gpus, which is {self.gpus}")
        return self

    @property
    def profile_json(self) -> str:
        return "" if self.profile is None else json.dumps(self.profile, sort_keys=True)


def shape_of(document: PlanRequestDocument) -> GpuShape:
    """The shape that a request names."""
    if document.shape is not None:
        groups = (GpuGroup(group.gpu, group.nodes, group.gpus_per_node) for group in document.shape)
        return GpuShape(tuple(sorted(groups, key=lambda group: (group.gpu, -group.gpus_per_node))))
    assert document.gpus is not None, "the form requires gpus beside gpu"
    if document.nodes is not None:
        return GpuShape((GpuGroup(document.gpu, document.nodes, document.gpus // document.nodes),))
    return GpuShape.packed(document.gpu, document.gpus, GPUS_PER_NODE)
