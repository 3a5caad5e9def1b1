"""The cluster file of `ebbtide simulate`: pools, their nodes, and how the simulated world behaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import BeforeValidator, Field, model_validator

from scheduler.documents.document import Document, read
from scheduler.documents.job_queue import QuotaDocument
from scheduler.documents.refusal import RefusedError, refused_field
from scheduler.documents.units import Duration, PositiveDuration
from scheduler.domain.fleet import DAY_S, Blackout, LendingPolicy, Node, Pool, PoolKind
from scheduler.domain.job_queue import JobQueue

DEFAULT_MODEL = "default"

Count = Annotated[int, Field(strict=True, ge=1, le=100_000)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,50}[a-z0-9])?$")]


class ClusterError(ValueError):
    """A cluster file that is not what it should be; the message names the file, the field, the value and what
    is allowed."""


class BlackoutDocument(Document):
    """A daily window, in seconds of the UTC day, in which nothing new is lent. It may wrap around midnight."""

    start_s: Annotated[float, Field(ge=0, lt=DAY_S)]
    end_s: Annotated[float, Field(ge=0, le=DAY_S)]


class LendingDocument(Document):
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
    blackouts: list[BlackoutDocument] = Field(default=[])

    def policy(self) -> LendingPolicy:
        plain = self.model_dump(exclude={"blackouts"})
        return LendingPolicy(**plain, blackouts=tuple(Blackout(b.start_s, b.end_s) for b in self.blackouts))


class PoolDocument(Document):
    """`nodes` equal hosts. `peak_gpus` is what the largest `load` of the pool's demand needs; `demand` names the series
    of the demand file that is the pool's, where that is not the one of the pool's own name."""

    name: Name
    kind: PoolKind
    nodes: Count
    gpus_per_node: Count
    gpu: Annotated[str, Field(min_length=1)]
    peak_gpus: Annotated[float, Field(gt=0)] | None = None
    demand: Annotated[str, Field(min_length=1)] | None = None
    lending: LendingDocument | None = None

    @model_validator(mode="after")
    def _lends_only_inference(self) -> Self:
        if self.kind is PoolKind.TRAINING:
            if self.lending is not None:
                raise refused_field("lending", "given", "absent: a training pool lends nothing")
            if self.peak_gpus is not None:
                raise refused_field("peak_gpus", self.peak_gpus, "absent: a training pool has no demand trace")
            if self.demand is not None:
                raise refused_field("demand", self.demand, "absent: a training pool has no demand trace")
        return self

    @property
    def series(self) -> str:
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


class QueueDocument(QuotaDocument):
    """A queue of the jobs trace, `name` as the trace spells it. Queues that are left out have no guarantee and no
    limit."""

    name: Annotated[str, Field(min_length=1, max_length=253)]


def _as_table(value: Any) -> Any:
    return value if isinstance(value, Mapping) else {DEFAULT_MODEL: value}


class ClusterDocument(Document):
    """The whole file. `reconfiguration_s` is written as one number, or as a table by model with an entry `default`.
    `start_s` is what a job's first start takes, where the trace's run times do not have it in them."""

    pools: list[PoolDocument]
    elastic: ElasticDocument | None = None
    reconfiguration_s: Annotated[dict[str, Duration], BeforeValidator(_as_table)] = Field(default={DEFAULT_MODEL: 30.0})
    start_s: Duration = 0.0
    checkpoint_interval_s: PositiveDuration = 900.0
    lending_period_s: PositiveDuration = 300.0
    queues: list[QueueDocument] = Field(default=[])

    @model_validator(mode="after")
    def _whole(self) -> Self:
        names = [pool.name for pool in self.pools]
        if not names:
            raise refused_field("pools", "none", "at least one pool of kind training")
        _refuse_repeated("pool", names)
        _refuse_repeated("queue", [queue.name for queue in self.queues])
        if all(pool.kind is PoolKind.INFERENCE for pool in self.pools):
            raise refused_field("pools", ", ".join(names), "at least one pool of kind training")
        table = self.reconfiguration_s
        if DEFAULT_MODEL not in table:
            allowed = f"a number of seconds, or a table by model with an entry {DEFAULT_MODEL!r}"
            raise refused_field("reconfiguration_s", ", ".join(table), allowed)
        return self

    @property
    def gpus(self) -> int:
        return sum(pool.gpus for pool in self.pools)


def _refuse_repeated(noun: str, names: list[str]) -> None:
    for at, name in enumerate(names):
        if name in names[:at]:
            raise refused_field(f"{noun}s.{at}.name", name, f"a name that no other {noun} has")


def domain_queues(document: ClusterDocument) -> tuple[JobQueue, ...]:
    return tuple(JobQueue(**queue.model_dump()) for queue in document.queues)


def domain_pools(document: ClusterDocument) -> tuple[Pool, ...]:
    return tuple(
        Pool(pool.name, pool.kind, pool.lending.policy() if pool.lending else LendingPolicy(enabled=False))
        for pool in document.pools
    )


def domain_nodes(document: ClusterDocument, memory_bytes: Callable[[str], int]) -> tuple[Node, ...]:
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
    text = _text(path)
    try:
        _refuse_repeated_keys(path, text)
        document: Any = yaml.safe_load(text)
    except yaml.MarkedYAMLError as wrong:
        line = f" line {wrong.problem_mark.line + 1}" if wrong.problem_mark else ""
        raise ClusterError(f"{path}{line}: is not YAML: {wrong.problem or wrong}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as wrong:
        raise ClusterError(f"{path}: is not YAML: {' '.join(str(wrong).split())}") from None
    try:
        return read(ClusterDocument, document)
    except RefusedError as refused:
        raise ClusterError(f"{path} line {_line_of(text, refused.refusals[0].field)}: {refused}") from None


def refused_in(path: Path, field: str, value: object, allowed: str) -> ClusterError:
    """The error for somebody else to raise about one field of the cluster file that was read from `path`."""
    return ClusterError(f"{path} line {_line_of(_text(path), field)}: {field}: got {value!r}; allowed: {allowed}")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as wrong:
        raise ClusterError(f"{path}: cannot be read: {wrong.strerror or wrong}") from None
    except UnicodeDecodeError as wrong:
        raise ClusterError(f"{path}: is not UTF-8 text (byte {wrong.start})") from None


def _refuse_repeated_keys(path: Path, text: str) -> None:
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


def _line_of(text: str, field: str) -> int:
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
