"""The document that hands in a simulation: the files of `ebbtide simulate` as texts, policy sets and a seed."""

from __future__ import annotations

import json
import zlib
from base64 import b64decode
from typing import Annotated, Any

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from scheduler.documents.document import Document
from scheduler.documents.refusal import Refusal, RefusedError
from scheduler.domain.simulation_task import SimulationFiles

TEXT_BYTES_MAX = 128 * 2**20
POLICIES_MAX = 20


def _each_once(names: list[str]) -> list[str]:
    for name in names:
        if names.count(name) > 1:
            raise PydanticCustomError("policies", "{form}", {"form": f"each policy set once; {name!r} is named twice"})
    return names


class Packed(Document):
    """A text that was gzipped, and then written as base64."""

    gzip_base64: str


Policies = Annotated[
    list[Annotated[str, Field(max_length=253)]],
    Field(min_length=1, max_length=POLICIES_MAX, examples=[["ebbtide", "fifo"]]),
    AfterValidator(_each_once),
]


class SimulationDocument(Document):
    """`jobs` and `demand` are CSV, `cluster` is YAML or the object that the YAML stands for."""

    jobs: str | Packed
    demand: str | Packed = ""
    cluster: str | dict[str, Any]
    policies: Policies = Field(default=["ebbtide"])
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**63)] = 0


def simulation_files(document: SimulationDocument) -> SimulationFiles:
    """The texts of the document.

    Raises:
        RefusedError: one cannot be unpacked, or becomes too large.
    """
    cluster = document.cluster if isinstance(document.cluster, str) else _as_yaml(document.cluster)
    return SimulationFiles(_text("jobs", document.jobs), _text("demand", document.demand), cluster)


def _as_yaml(cluster: dict[str, Any]) -> str:
    """JSON is YAML."""
    try:
        return json.dumps(cluster)
    except RecursionError:
        raise RefusedError(Refusal("cluster", None, "an object that is not nested so deeply")) from None


def _text(field: str, given: str | Packed) -> str:
    if isinstance(given, str):
        return given
    field, unpacking = f"{field}.gzip_base64", zlib.decompressobj(wbits=31)  # gzip's form
    try:
        data = unpacking.decompress(b64decode(given.gzip_base64, validate=True), TEXT_BYTES_MAX)
        if unpacking.unconsumed_tail:
            raise RefusedError(Refusal(field, None, f"at most {TEXT_BYTES_MAX} bytes, unpacked"))
        if not unpacking.eof:
            raise RefusedError(Refusal(field, None, "a whole file; this one ends early"))
        return data.decode("utf-8-sig")
    except RefusedError:
        raise
    except (ValueError, zlib.error) as wrong:  # base64 has errors of its own, and plain ones
        raise RefusedError(Refusal(field, None, f"gzipped UTF-8 text as base64 ({wrong})")) from None
