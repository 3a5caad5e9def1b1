"""PageOf: what every list answers, and the plain values that several nouns share."""

from __future__ import annotations

from typing import Annotated, Generic, TypeVar

from pydantic import Field
from typing_extensions import TypedDict

from scheduler.domain import gpus as gpu_sets

Item = TypeVar("Item")
GpusByNode = Annotated[dict[str, list[int]], Field(description="Indices of GPUs, by node.")]
AtSeconds = Annotated[float, Field(description="Seconds since 1970 (UTC).")]


class PageOf(TypedDict, Generic[Item]):
    """One page of a list. `next` is the `cursor` that asks for the following page; null on the last one."""

    items: list[Item]
    next: str | None


def encode_gpus(gpus: gpu_sets.Gpus) -> GpusByNode:
    return {node: list(indices) for node, indices in sorted(gpus.items())}
