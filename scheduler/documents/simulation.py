"""The cluster file of `ebbtide simulate`: pools, their nodes, and how the simulated world behaves.

The document that hands in a simulation: the files of `ebbtide simulate` as texts, policy sets and a seed.
"""

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

from scheduler.documents.document import Document, InvalidDocumentError, InvalidField, invalid_field, parse_document
from scheduler.documents.queue import QuotaDocument
from scheduler.documents.units import Duration, PositiveDuration
from scheduler.domain.fleet import DAY_S, Blackout, LendingPolicy, Node, Pool, PoolKind
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.simulation_task import SimulationFiles

DEFAULT_MODEL = "default"

Count = Annotated[int, Field(strict=True, ge=1, le=100_000)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,50}[a-z0-9])?$")]


class ClusterError(ValueError):
    """A cluster file that is not what it should be; the message names the file, the field, the value and what
    is allowed."""


class ClusterBlackoutDocument(Document):
    """A daily window, in seconds of the UTC day, in which nothing new is lent. It may wrap around midnight."""

    start_s: Annotated[float, Field(ge=0, lt=DAY_S)]
    end_s: Annotated[float, Field(ge=0, le=DAY_S)]


class ClusterLendingDocument(Document):
    """What the owner of an inference pool allows (`LendingPolicy`)."""

    enabled: Annotated[bool, Field(strict=True)] = True
    quantile: Annotated[float, Field(gt=0, lt=1)] = 0.999
    headroom: Annotated[float, Field(ge=0, lt=1)] = 0.02
    return_deadline_s: Duration = 300.0
    cold_start_s: Duration = 300.0
    kept_nodes_min: Annotated[int, Field(strict=True, ge=0)] = 0
    lent_nodes_max: Annotated[int, Field(strict=True, ge=0)] | None = None
    loan_s_min: Duration = 0.0
    demand_stale_s: PositiveDuration | None = None
    blackouts: list[ClusterBlackoutDocument] = Field(default=[])

    def to_lending_policy(self) -> LendingPolicy:
        plain = self.model_dump(exclude={"blackouts"})
        return LendingPolicy(**plain, blackouts=tuple(Blackout(b.start_s, b.end_s) for b in self.blackouts))


class ClusterPoolDocument(Document):
    """`nodes` equal hosts. `peak_gpus` is what the largest `load` of the pool's demand needs; `demand` names the series
    of the demand file that is the pool's, where that is not the one of the pool's own name."""

    name: Name
    kind: PoolKind
    nodes: Count
    gpus_per_node: Count
    gpu: Annotated[str, Field(min_length=1)]
    peak_gpus: Annotated[float, Field(gt=0)] | None = None
    demand: Annotated[str, Field(min_length=1)] | None = None
    lending: ClusterLendingDocument | None = None

    @model_validator(mode="after")
    def _check_inference_fields(self) -> Self:
        if self.kind is PoolKind.TRAINING:
            if self.lending is not None:
                raise invalid_field("lending", "given", "absent: a training pool lends nothing")
            if self.peak_gpus is not None:
                raise invalid_field("peak_gpus", self.peak_gpus, "absent: a training pool has no demand trace")
            if self.demand is not None:
                raise invalid_field("demand", self.demand, "absent: a training pool has no demand trace")
        return self

    @property
    def demand_series(self) -> str:
        """The name under which the demand file has this pool's demand."""
        return self.demand or self.name

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


class ElasticDocument(Document):
    """The GPU range of jobs without min_gpus and max_gpus, from `from_gpus` GPUs on."""

    from_gpus: Count = 2
    min_ratio: Annotated[float, Field(gt=0, le=1)] = 0.5
    max_ratio: Annotated[float, Field(ge=1)] = 2.0


class ClusterQueueDocument(QuotaDocument):
    """A queue of the jobs trace, `name` as the trace spells it. Queues that are left out have no guarantee and no
    limit."""

    name: Annotated[str, Field(min_length=1, max_length=253)]


def _wrap_default(value: Any) -> Any:
    return value if isinstance(value, Mapping) else {DEFAULT_MODEL: value}


class ClusterDocument(Document):
    """The whole file. `reconfiguration_s` is written as one number, or as a table by model with an entry `default`.
    `start_s` is what a job's first start takes, where the trace's run times do not have it in them."""

    pools: list[ClusterPoolDocument]
    elastic: ElasticDocument | None = None
    reconfiguration_s: Annotated[dict[str, Duration], BeforeValidator(_wrap_default)] = Field(
        default={DEFAULT_MODEL: 30.0}
    )
    start_s: Duration = 0.0
    checkpoint_interval_s: PositiveDuration = 900.0
    lending_period_s: PositiveDuration = 300.0
    queues: list[ClusterQueueDocument] = Field(default=[])

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
            allowed = f"a number of seconds, or a table by model with an entry {DEFAULT_MODEL!r}"
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
        Pool(pool.name, pool.kind, pool.lending.to_lending_policy() if pool.lending else LendingPolicy(enabled=False))
        for pool in document.pools
    )


def build_nodes(document: ClusterDocument, memory_bytes: Callable[[str], int]) -> tuple[Node, ...]:
    """Every node, named `<pool>-<number>`. `memory_bytes` gives the memory of one GPU of a model.

    Raises:
        ValueError: whatever `memory_bytes` raises for a model that it does not know.
    """
    return tuple(
        Node(f"{pool.name}-{number:0{len(str(pool.nodes - 1))}d}", pool.name, pool.gpu, pool.gpus_per_node, memory)
        for pool in document.pools
        for memory in [memory_bytes(pool.gpu)]
        for number in range(pool.nodes)
    )


def read_cluster(path: Path) -> ClusterDocument:
    """The cluster file at `path`.

    Raises:
        ClusterError: it cannot be read, is not YAML, or a field is refused.
    """
    text = _read_text(path)
    try:
        _check_unique_keys(path, text)
        document: Any = yaml.safe_load(text)
    except yaml.MarkedYAMLError as wrong:
        line = f" line {wrong.problem_mark.line + 1}" if wrong.problem_mark else ""
        raise ClusterError(f"{path}{line}: is not YAML: {wrong.problem or wrong}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as wrong:
        raise ClusterError(f"{path}: is not YAML: {' '.join(str(wrong).split())}") from None
    try:
        return parse_document(ClusterDocument, document)
    except InvalidDocumentError as refused:
        raise ClusterError(f"{path} line {_find_line(text, refused.invalid_fields[0].field)}: {refused}") from None


def cluster_field_error(path: Path, field: str, value: object, allowed: str) -> ClusterError:
    """The error for somebody else to raise about one field of the cluster file that was read from `path`."""
    return ClusterError(
        f"{path} line {_find_line(_read_text(path), field)}: {field}: got {value!r}; allowed: {allowed}"
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as wrong:
        raise ClusterError(f"{path}: cannot be read: {wrong.strerror or wrong}") from None
    except UnicodeDecodeError as wrong:
        raise ClusterError(f"{path}: is not UTF-8 text (byte {wrong.start})") from None


def _check_unique_keys(path: Path, text: str) -> None:
    """YAML lets the last of several equal keys win; of two lists of pools one would be dropped without a word."""
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
                raise ClusterError(
                    f"{path} line {key.start_mark.line + 1}: {name}: stands there twice; allowed is once"
                )
            keys.add(name)
            nodes.append(value)


def _find_line(text: str, field: str) -> int:
    """The line of a field such as `pools.1.name`, or of as much of it as the file has."""
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
            raise PydanticCustomError("policies", "{form}", {"form": f"each policy set once; {name!r} is named twice"})
    return names


class Packed(Document):
    """A text that was gzipped, and then written as base64."""

    gzip_base64: str


Policies = Annotated[
    list[Annotated[str, Field(max_length=253)]],
    Field(min_length=1, max_length=POLICIES_MAX, examples=[["ebbtide", "fifo"]]),
    AfterValidator(_check_unique_policies),
]


class SimulationDocument(Document):
    """`jobs` and `demand` are CSV, `cluster` is YAML or the object that the YAML stands for."""

    jobs: str | Packed
    demand: str | Packed = ""
    cluster: str | dict[str, Any]
    policies: Policies = Field(default=["ebbtide"])
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**63)] = 0


def to_simulation_files(document: SimulationDocument) -> SimulationFiles:
    """The texts of the document.

    Raises:
        RefusedError: one cannot be unpacked, or becomes too large.
    """
    cluster = document.cluster if isinstance(document.cluster, str) else _dump_cluster(document.cluster)
    return SimulationFiles(_decode_text("jobs", document.jobs), _decode_text("demand", document.demand), cluster)


def _dump_cluster(cluster: dict[str, Any]) -> str:
    """JSON is YAML."""
    try:
        return json.dumps(cluster)
    except RecursionError:
        raise InvalidDocumentError(InvalidField("cluster", None, "an object that is not nested so deeply")) from None


def _decode_text(field: str, given: str | Packed) -> str:
    if isinstance(given, str):
        return given
    field, unpacking = f"{field}.gzip_base64", zlib.decompressobj(wbits=31)  # gzip's form
    try:
        data = unpacking.decompress(b64decode(given.gzip_base64, validate=True), TEXT_BYTES_MAX)
        if unpacking.unconsumed_tail:
            raise InvalidDocumentError(InvalidField(field, None, f"at most {TEXT_BYTES_MAX} bytes, unpacked"))
        if not unpacking.eof:
            raise InvalidDocumentError(InvalidField(field, None, "a whole file; this one ends early"))
        return data.decode("utf-8-sig")
    except InvalidDocumentError:
        raise
    except (ValueError, zlib.error) as wrong:  # base64 has errors of its own, and plain ones
        raise InvalidDocumentError(InvalidField(field, None, f"gzipped UTF-8 text as base64 ({wrong})")) from None
