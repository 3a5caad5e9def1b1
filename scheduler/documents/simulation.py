"""Inputs of a simulation: the cluster file of `ebbtide simulate`, and the document that submits a simulation."""

from __future__ import annotations

import json
import zlib
from base64 import b64decode
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from scheduler.documents.document import (
    LABEL_FORM,
    Document,
    InvalidDocumentError,
    InvalidField,
    invalid_field,
    parse_document,
    require_form,
)
from scheduler.documents.fleet import LendingDocument, to_lending_policy
from scheduler.documents.queue import QuotaDocument
from scheduler.documents.units import Duration, PositiveDuration
from scheduler.domain.fleet import Node, Pool, PoolKind, list_last_gpus
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.domain.simulation_task import SimulationFiles

DEFAULT_MODEL = "default"
STORAGE_BYTES_PER_S = 3.125e9
"""Bytes per second that one node writes to, or reads from, the storage of checkpoints: all of a 25 Gbit/s port, which
MinIO's network requirements for AIStor servers equate to 3.125 GB/s."""

Count = Annotated[int, Field(strict=True, ge=1, le=100_000)]
_NAME_PATTERN = r"^[a-z0-9]([-a-z0-9]{0,50}[a-z0-9])?$"
Name = Annotated[str, Field(json_schema_extra={"pattern": _NAME_PATTERN}), require_form(_NAME_PATTERN, LABEL_FORM)]


class ClusterError(ValueError):
    """An invalid cluster file. The message names the file, the line, the field, the value and the allowed values."""


class ClusterPoolDocument(Document):
    """A pool of `nodes` equal nodes.

    `lendable_gpus` is the number of GPUs that a loan takes of a node while inference serves from the others; by default
    it takes the whole node. The last `partial_nodes` nodes lend so, by default all.
    `peak_gpus` is the demand at the largest `load` in the demand file. `demand` names the pool's series in that file,
    by default the pool's name.
    """

    name: Name
    kind: PoolKind
    nodes: Count
    gpus_per_node: Count
    gpu: Annotated[str, Field(min_length=1)]
    peak_gpus: Annotated[float, Field(gt=0)] | None = None
    demand: Annotated[str, Field(min_length=1)] | None = None
    lending: LendingDocument | None = None
    lendable_gpus: Count | None = None
    partial_nodes: Count | None = None

    @model_validator(mode="after")
    def _check_partial_loans(self) -> Self:
        if self.lendable_gpus is not None and self.lendable_gpus >= self.gpus_per_node:
            form = (
                f"at most {self.gpus_per_node - 1}, fewer than gpus_per_node" if self.gpus_per_node > 1 else "nothing"
            )
            raise invalid_field("lendable_gpus", self.lendable_gpus, f"{form}; omit it to lend whole nodes")
        if self.partial_nodes is not None and self.lendable_gpus is None:
            raise invalid_field("partial_nodes", self.partial_nodes, "nothing without lendable_gpus; set both")
        if self.partial_nodes is not None and self.partial_nodes > self.nodes:
            raise invalid_field("partial_nodes", self.partial_nodes, f"at most {self.nodes}, the pool's nodes")
        return self

    @model_validator(mode="after")
    def _check_inference_fields(self) -> Self:
        if self.kind is PoolKind.TRAINING:
            if self.lendable_gpus is not None:
                raise invalid_field("lendable_gpus", self.lendable_gpus, "nothing; training pools do not lend")
            if self.lending is not None:
                raise invalid_field("lending", "given", "nothing; training pools do not lend")
            if self.peak_gpus is not None:
                raise invalid_field("peak_gpus", self.peak_gpus, "nothing; training pools have no demand")
            if self.demand is not None:
                raise invalid_field("demand", self.demand, "nothing; training pools have no demand")
        return self

    @property
    def demand_series(self) -> str:
        """Name of the pool's series in the demand file."""
        return self.demand or self.name

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    def list_lendable_gpus(self, number: int) -> tuple[int, ...]:
        """Return the GPU indices that a loan of this node takes, its last ones; none if it takes the whole node."""
        is_partial = number >= self.nodes - self.count_partial_nodes()
        return list_last_gpus(self.gpus_per_node, self.lendable_gpus or 0) if is_partial else ()

    def count_partial_nodes(self) -> int:
        """Return the number of nodes of which a loan takes only a part."""
        if self.lendable_gpus is None:
            return 0
        return self.nodes if self.partial_nodes is None else self.partial_nodes


class ElasticDocument(Document):
    """GPU range of jobs without min_gpus and max_gpus, if they use `from_gpus` GPUs or more."""

    from_gpus: Count = 2
    min_ratio: Annotated[float, Field(gt=0, le=1)] = 0.5
    max_ratio: Annotated[float, Field(ge=1)] = 2.0


class ClusterQueueDocument(QuotaDocument):
    """A queue of the job trace. Queues that are not listed have the default quota."""

    name: Annotated[str, Field(min_length=1, max_length=253)]


def _wrap_default(value: Any) -> Any:
    return value if isinstance(value, Mapping) else {DEFAULT_MODEL: value}


class ClusterDocument(Document):
    """The cluster file.

    `reconfiguration_s` is a number, or an object by model with an entry `default`. `start_s` is the duration of a job's
    first start, if the trace's run times exclude it.

    A reconfiguration also writes and reads the job's checkpoint, with `storage_bytes_per_s` per node. Null stands for a
    `reconfiguration_s` that includes this.
    """

    pools: list[ClusterPoolDocument]
    elastic: ElasticDocument | None = None
    reconfiguration_s: Annotated[dict[str, Duration], BeforeValidator(_wrap_default)] = Field(
        default={DEFAULT_MODEL: 30.0}
    )
    start_s: Duration = 0.0
    checkpoint_interval_s: PositiveDuration = 900.0
    lending_period_s: PositiveDuration = 300.0
    queues: list[ClusterQueueDocument] = Field(default=[])
    storage_bytes_per_s: Annotated[float, Field(gt=0)] | None = STORAGE_BYTES_PER_S

    @model_validator(mode="after")
    def _check_cluster(self) -> Self:
        names = [pool.name for pool in self.pools]
        if not names:
            raise invalid_field("pools", "none", "at least one pool of kind training")
        _check_unique_names("pool", names)
        _check_unique_names("queue", [queue.name for queue in self.queues])
        if all(pool.kind is PoolKind.INFERENCE for pool in self.pools):
            raise invalid_field("pools", ", ".join(names), "at least one pool of kind training")
        table = self.reconfiguration_s
        if DEFAULT_MODEL not in table:
            allowed = f"a number of seconds, or an object by model with an entry {DEFAULT_MODEL!r}"
            raise invalid_field("reconfiguration_s", ", ".join(table), allowed)
        return self

    @property
    def gpus(self) -> int:
        return sum(pool.gpus for pool in self.pools)


def _check_unique_names(noun: str, names: list[str]) -> None:
    for at, name in enumerate(names):
        if name in names[:at]:
            raise invalid_field(f"{noun}s.{at}.name", name, f"a name that no other {noun} has")


def build_queues(document: ClusterDocument) -> tuple[JobQueue, ...]:
    return tuple(JobQueue(**queue.model_dump()) for queue in document.queues)


def build_pools(document: ClusterDocument) -> tuple[Pool, ...]:
    return tuple(
        Pool(pool.name, pool.kind, to_lending_policy(pool.lending) if pool.lending else LendingPolicy(enabled=False))
        for pool in document.pools
    )


def build_nodes(document: ClusterDocument, memory_bytes: Callable[[str], int]) -> tuple[Node, ...]:
    """Return all nodes, named `<pool>-<number>`. `memory_bytes` returns the memory of one GPU of a model.

    Raises:
        ValueError: `memory_bytes` does not know a model.
    """
    return tuple(
        Node(
            f"{pool.name}-{number:0{len(str(pool.nodes - 1))}d}",
            pool.name,
            pool.gpu,
            pool.gpus_per_node,
            memory,
            lendable_gpus=pool.list_lendable_gpus(number),
        )
        for pool in document.pools
        for memory in [memory_bytes(pool.gpu)]
        for number in range(pool.nodes)
    )


def read_cluster(path: Path) -> ClusterDocument:
    """Read the cluster file at `path`.

    Raises:
        ClusterError: the file cannot be read, is not YAML, or has an invalid field.
    """
    text = _read_text(path)
    try:
        _check_unique_keys(path, text)
        document: Any = yaml.safe_load(text)
    except ClusterError:
        raise
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ClusterError(f"{path}{line}: is not YAML: {error.problem or error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ClusterError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
    try:
        return parse_document(ClusterDocument, document)
    except InvalidDocumentError as error:
        raise ClusterError(f"{path} line {_find_line(text, error.invalid_fields[0].field)}: {error}") from None


def cluster_field_error(path: Path, field: str, value: object, allowed: str) -> ClusterError:
    """Create the error about one field of the cluster file at `path`."""
    return ClusterError(
        f"{path} line {_find_line(_read_text(path), field)}: {field}: got {value!r}; allowed: {allowed}"
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ClusterError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ClusterError(f"{path}: is not UTF-8 text (byte {error.start})") from None


def _check_unique_keys(path: Path, text: str) -> None:
    """Reject duplicate keys, because YAML silently keeps only the last one."""
    nodes, seen = [yaml.compose(text, Loader=yaml.SafeLoader)], set[int]()
    while nodes:
        node = nodes.pop()
        if id(node) in seen or not isinstance(node, yaml.CollectionNode):
            continue
        seen.add(id(node))
        keys = set[str]()
        for child in node.value:
            if not isinstance(node, yaml.MappingNode):
                nodes.append(child)
                continue
            key, value = child
            name = str(key.value)
            if name in keys:
                raise ClusterError(f"{path} line {key.start_mark.line + 1}: {name}: duplicate key; use each key once")
            keys.add(name)
            nodes.append(value)


def _find_line(text: str, field: str) -> int:
    """Return the line of a field such as `pools.1.name`, or of its deepest parent in the file."""
    node = yaml.compose(text)
    line = node.start_mark.line if node else 0
    for part in field.split("."):
        children = {key.value: child for key, child in node.value} if isinstance(node, yaml.MappingNode) else {}
        if isinstance(node, yaml.SequenceNode):
            children = {str(number): child for number, child in enumerate(node.value)}
        if part not in children:
            break
        node = children[part]
        line = node.start_mark.line
    return line + 1


TEXT_BYTES_MAX = 128 * 2**20
POLICIES_MAX = 20


def _check_unique_policies(names: list[str]) -> list[str]:
    for name in names:
        if names.count(name) > 1:
            raise PydanticCustomError("policies", "{form}", {"form": f"each policy set once; {name!r} is listed twice"})
    return names


class Packed(Document):
    """Text as base64-encoded gzip."""

    gzip_base64: str = Field(description="Base64 of a complete gzip file of UTF-8 text, at most 128 MiB when unpacked.")


Policies = Annotated[
    list[Annotated[str, Field(max_length=253)]],
    Field(min_length=1, max_length=POLICIES_MAX, examples=[["ebbtide", "fifo"]]),
    AfterValidator(_check_unique_policies),
]


class SimulationDocument(Document):
    """A simulation to run in the background. CSV files are given as text or packed."""

    jobs: str | Packed = Field(description="CSV trace of the jobs to submit, as for `ebbtide simulate`.")
    demand: str | Packed = Field(default="", description="CSV trace of the GPUs that inference needs. Empty: none.")
    cluster: str | dict[str, Any] = Field(
        description="Pools, nodes and queues: YAML text, or the same content as an object."
    )
    policies: Policies = Field(
        default=["ebbtide"], description="Names of the policy sets to compare, at most 20, each once."
    )
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**63)] = Field(
        default=0, description="Start value of the random numbers. The same one gives the same report."
    )


def to_simulation_files(document: SimulationDocument) -> SimulationFiles:
    """Return the texts of the input files.

    Raises:
        InvalidDocumentError: a text cannot be unpacked, or is too large.
    """
    cluster = document.cluster if isinstance(document.cluster, str) else _dump_cluster(document.cluster)
    return SimulationFiles(_decode_text("jobs", document.jobs), _decode_text("demand", document.demand), cluster)


def _dump_cluster(cluster: dict[str, Any]) -> str:
    """Return the object as JSON, which is valid YAML."""
    try:
        return json.dumps(cluster)
    except RecursionError:
        raise InvalidDocumentError(InvalidField("cluster", None, "an object with fewer levels of nesting")) from None


def _decode_text(field: str, given: str | Packed) -> str:
    if isinstance(given, str):
        return given
    field, decompressor = f"{field}.gzip_base64", zlib.decompressobj(wbits=31)  # the gzip format
    try:
        data = decompressor.decompress(b64decode(given.gzip_base64, validate=True), TEXT_BYTES_MAX)
        if decompressor.unconsumed_tail:
            raise InvalidDocumentError(InvalidField(field, None, f"at most {TEXT_BYTES_MAX} bytes when unpacked"))
        if not decompressor.eof:
            raise InvalidDocumentError(InvalidField(field, None, "a complete gzip file; this one is truncated"))
        return data.decode("utf-8-sig")
    except InvalidDocumentError:
        raise
    except (ValueError, zlib.error) as error:  # base64 raises binascii.Error, a ValueError
        raise InvalidDocumentError(InvalidField(field, None, f"base64-encoded gzip of UTF-8 text ({error})")) from None
