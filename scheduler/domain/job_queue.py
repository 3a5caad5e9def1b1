"""Job queues with their GPU quota, and the recorded GPU usage by queue and owner."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from scheduler.domain.suggestions import suggest

DEFAULT_QUEUE = "default"
"""Queue of jobs that name none. It exists without being created, and its limits apply to all undeclared queues."""
QUOTA_GPUS_MAX = 100_000
QUOTA_JOBS_MAX = 1_000_000
QUOTA_WEIGHT_MAX = 1e6
PRIORITY_LIMIT = 1000


class QuotaField(NamedTuple):
    """Declaration of one quota field of a queue.

    REST documents, the Queue custom resource, CLI options and tables derive from it, so a new field is declared
    here only. `option` is the CLI option, `label` the name in tables and messages. `spec_name` is the name in the
    custom resource, or empty if the field cannot be set there. Valid values are `minimum` to `maximum`; without
    `includes_minimum`, the minimum itself is invalid. A default of None means no limit. Tables show listed fields only.
    More of a field that `takes_from_others` disadvantages other queues, so only an admin of all queues raises it.
    """

    name: str
    type: type[int] | type[float]
    default: int | float | None
    description: str
    option: str
    label: str
    spec_name: str
    maximum: float
    minimum: float = 0
    includes_minimum: bool = True
    is_listed: bool = True
    takes_from_others: bool = False

    @property
    def is_optional(self) -> bool:
        return self.default is None

    def describe_range(self) -> str:
        return f"at least {self.minimum:g}" if self.includes_minimum else f"above {self.minimum:g} and finite"

    def is_raised(self, before: float | None, after: float | None) -> bool:
        """Return whether `after` gives the queue more than `before`. None is no limit, so it is more than any value."""
        return before is not None and (after is None or after > before)

    def accepts(self, value: float | None) -> bool:
        if value is None:
            return self.is_optional
        return self.minimum <= value < float("inf") and (self.includes_minimum or value > self.minimum)


def _quota(default: float | None, description: str, **declaration: Any) -> Any:
    return field(default=default, metadata={"quota": {"description": description, **declaration}})


@dataclass(frozen=True, slots=True)
class JobQueue:
    """A group of jobs that share a quota.

    All queues that were never created count as one queue without a guarantee, under the limits of the default queue.

    Queues borrow idle GPUs beyond their guarantee. The queue that borrows least relative to its weight comes first.
    Jobs without an owner count as the jobs of one owner.
    """

    name: str
    guaranteed_gpus: int = _quota(
        0,
        "Number of GPUs reserved for the jobs of this queue. Idle guaranteed GPUs can be borrowed and are reclaimed on "
        "demand.",
        option="--guaranteed",
        label="guaranteed",
        spec_name="guaranteed",
        maximum=QUOTA_GPUS_MAX,
        takes_from_others=True,
    )
    limit_gpus: int | None = _quota(
        None,
        "Maximum number of GPUs of all jobs of this queue together, borrowed GPUs included. Default: no limit.",
        option="--limit",
        label="limit",
        spec_name="limit",
        maximum=QUOTA_GPUS_MAX,
        takes_from_others=True,
    )
    weight: float = _quota(
        1.0,
        "Relative share of the GPUs that several queues borrow: a queue of weight 2 gets twice as many as one of "
        "weight 1.",
        option="--weight",
        label="weight",
        spec_name="weight",
        maximum=QUOTA_WEIGHT_MAX,
        includes_minimum=False,
        takes_from_others=True,
    )
    user_limit_gpus: int | None = _quota(
        None,
        "Maximum number of GPUs of all jobs of one owner in this queue. The owner of an ElasticJob is its namespace. "
        "Default: no limit.",
        option="--user-limit",
        label="user limit",
        spec_name="userLimit",
        maximum=QUOTA_GPUS_MAX,
    )
    user_jobs_max: int | None = _quota(
        None,
        "Maximum number of pending jobs of one owner in this queue. More submissions over HTTP are rejected. "
        "Default: no limit.",
        option="--user-jobs",
        label="user jobs",
        spec_name="",
        maximum=QUOTA_JOBS_MAX,
        is_listed=False,
    )
    priority_max: int = _quota(
        100,
        "Highest priority that submitters may give jobs of this queue. Only a queue-admin of the queue may give a job "
        "a higher one, and an ElasticJob with a higher one is refused.",
        option="--max-priority",
        label="max priority",
        spec_name="maxPriority",
        minimum=-PRIORITY_LIMIT,
        maximum=PRIORITY_LIMIT,
        is_listed=False,
        takes_from_others=True,
    )

    def __post_init__(self) -> None:
        for name, quota in QUOTA_FIELDS.items():
            value = getattr(self, name)
            if not quota.accepts(value):
                or_none = " or None" if quota.is_optional else ""
                raise ValueError(f"{name} must be {quota.describe_range()}{or_none}, got {value}")
        if self.limit_gpus is not None and self.limit_gpus < self.guaranteed_gpus:
            raise ValueError(
                f"limit_gpus must be at least guaranteed_gpus ({self.guaranteed_gpus}) or None, got {self.limit_gpus}"
            )

    @property
    def quota(self) -> dict[str, int | float | None]:
        """The quota fields by name."""
        return {name: getattr(self, name) for name in QUOTA_FIELDS}


def describe_quota(quota: Mapping[str, Any]) -> str:
    """Describe quota values by field name, for example `guaranteed 8, limit 16, weight 2`.

    Absent limits are left out, and so are the defaults of fields that tables do not show.
    """
    values = ((declared, quota[name]) for name, declared in QUOTA_FIELDS.items())
    return ", ".join(
        f"{declared.label} {format_quota_value(value)}"
        for declared, value in values
        if value is not None and (declared.is_listed or value != declared.default)
    )


def format_quota_value(value: float | None) -> str:
    return "none" if value is None else str(value) if isinstance(value, int) else f"{value:g}"


def _list_declared_fields() -> dict[str, QuotaField]:
    declared = {}
    for item in fields(JobQueue):
        if quota := item.metadata.get("quota"):
            default: Any = item.default
            number = float if isinstance(default, float) else int
            declared[item.name] = QuotaField(item.name, number, default, **quota)
    return declared


QUOTA_FIELDS: Mapping[str, QuotaField] = _list_declared_fields()
"""Declarations of the quota fields by field name, in the order of JobQueue."""


def is_existing_queue(name: str, created: Collection[str]) -> bool:
    return name == DEFAULT_QUEUE or name in created


def find_limiting_queue(name: str, declared: Collection[str]) -> str:
    """Return the queue whose limits apply to jobs of the queue `name`: itself if it is declared, else the default."""
    return name if name in declared else DEFAULT_QUEUE


def find_priority_ceiling(name: str, queues: Mapping[str, JobQueue]) -> tuple[str, int]:
    """Return the highest priority of jobs of the queue `name`, and the queue that sets it."""
    limiting = find_limiting_queue(name, queues)
    return limiting, queues.get(limiting, JobQueue(limiting)).priority_max


def describe_existing_queues(name: str, visible: Iterable[str]) -> str:
    """Return what a job may name instead of the queue `name`, which does not exist.

    Args:
        visible: names of created queues that the caller may know.
    """
    names = sorted({DEFAULT_QUEUE, *visible})
    return f"one of {', '.join(names)}, or a new queue that is created first{suggest(name, names)}"


HOUR_S = 3600


@dataclass(frozen=True, slots=True, order=True)
class UsageKey:
    """The key of one row of the usage report.

    The hour starts at `hour_s` (UTC). The GPUs of a row have one model, and either all or none of them were lent by an
    inference pool. `model` is what the jobs train, as in `JobSpec.model_label`; it is also empty for usage that was
    recorded before models were.
    """

    hour_s: int
    queue: str
    owner_id: str
    gpu: str
    is_lent: bool
    model: str = ""


@dataclass(frozen=True, slots=True, order=True)
class UsageEntry:
    """GPU-seconds held in one hour.

    `lost_gpu_s` are the GPU-seconds whose work was lost, booked in the hour in which the loss was observed. They can
    exceed the hour's `gpu_s`. `owner` is the owner's display name, which tells no owners apart.
    """

    key: UsageKey
    gpu_s: float
    lost_gpu_s: float = 0.0
    owner: str = field(default="", compare=False)


def list_usage_columns(by: Iterable[str]) -> list[str]:
    """Return the fields that tell the rows of a usage report apart: its dimensions, and the id of an owner's name."""
    return [column for name in by for column in ((name, "owner_id") if name == "owner" else (name,))]
