"""Documents of what a pool's owner knows of its time: time zone, blackouts, known events and a demand profile."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Self

from cronsim import CronSim, CronSimError
from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from scheduler.documents.document import Document, Text, invalid_field
from scheduler.documents.units import Duration, PositiveDuration
from scheduler.domain.known_events import FACTOR_MAX, KnownEvent
from scheduler.domain.lending_policy import DAY_S, PROFILE_HOURS, Blackout
from scheduler.domain.time_zones import describe_zone_form, is_zone, to_instant_s

CRON_FORM = 'five fields of a cron expression, such as "0 8 * * 1-5" (minute, hour, day of month, month, day of week)'
START_FORM = (
    "an ISO 8601 time such as 2026-11-27T08:00:00+01:00, one without an offset by the clock of the pool, or seconds "
    "since 1970"
)
WINDOW_S_MAX = 366 * DAY_S
GPUS_MAX = 1e9
_CRON_FIELDS = 5
_CRON_TESTED_FROM = datetime(2020, 1, 1, tzinfo=UTC)


def _check_zone(name: str) -> str:
    if not is_zone(name):
        raise PydanticCustomError("zone", "Input should be {form}", {"form": describe_zone_form(name)})
    return name


def _check_optional_zone(name: str) -> str:
    return _check_zone(name) if name else name


def _check_cron(text: str) -> str:
    """Accept an expression that comes true at some time in 50 years."""
    if not text:
        return text
    form = CRON_FORM
    if len(text.split()) == _CRON_FIELDS:  # cronsim would also take seconds
        try:
            if next(CronSim(text, _CRON_TESTED_FROM), None) is not None:
                return text
            form = f"{CRON_FORM}, for a time that exists"
        except CronSimError as error:
            form = f"{CRON_FORM} ({error})"
    raise PydanticCustomError("cron", "Input should be {form}", {"form": form})


def _parse_start(value: Any) -> float | datetime:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e12:
        return float(value)
    if isinstance(value, str | datetime):  # YAML has parsed a time that is not quoted
        try:
            return datetime.fromisoformat(value) if isinstance(value, str) else value
        except ValueError:
            pass
    raise PydanticCustomError("start", "Input should be {form}", {"form": START_FORM})


def _check_profile(gpus: list[float]) -> list[float]:
    if gpus and len(gpus) not in PROFILE_HOURS:
        form = f"{PROFILE_HOURS[0]} numbers, one per hour of the day, or {PROFILE_HOURS[1]}, one per hour of the week"
        raise PydanticCustomError("profile", "Input should be {form}", {"form": form})
    return gpus


ZoneName = Annotated[Text, AfterValidator(_check_zone)]
OptionalZoneName = Annotated[Text, AfterValidator(_check_optional_zone)]
CronText = Annotated[Text, AfterValidator(_check_cron)]
EventStart = Annotated[
    float | datetime,
    BeforeValidator(_parse_start),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, {"type": "string"}]}),
]
DemandProfile = Annotated[
    list[Annotated[float, Field(strict=True, ge=0, le=GPUS_MAX)]],
    Field(max_length=PROFILE_HOURS[1]),
    AfterValidator(_check_profile),
]


class BlackoutDocument(Document):
    """Times without new loans: a daily window, which may wrap around midnight, or windows by a cron expression."""

    start_s: Duration = Field(
        default=0.0,
        description='First moment of the window: seconds, or text such as "22h30m", after midnight UTC, or after '
        "midnight in `time_zone`. With `cron`, after each time of the expression.",
    )
    end_s: Duration = Field(
        default=0.0,
        description='End of the window, counted like its start: seconds, or text such as "6h". Omit it with '
        "`duration_s`.",
    )
    cron: CronText = Field(
        default="",
        description='Cron expression of the times at which windows begin, such as "0 8 * * 1-5". Empty: a daily '
        "window.",
    )
    duration_s: PositiveDuration | None = Field(
        default=None, description='Duration of the windows of `cron`: seconds, or text such as "10h".'
    )
    time_zone: OptionalZoneName = Field(
        default="",
        description="IANA time zone whose clock the window follows. Empty: UTC for a daily window, the zone of the "
        "pool for `cron`.",
    )

    @model_validator(mode="after")
    def _check_window(self) -> Self:
        if self.cron:
            self._check_cron_window()
            return self
        if self.duration_s is not None:
            raise invalid_field("duration_s", self.duration_s, "nothing without `cron`; set start_s and end_s")
        for name in ("start_s", "end_s"):
            if name not in self.model_fields_set:
                raise invalid_field(name, None, "a value; a window without `cron` has a start and an end")
            if getattr(self, name) > DAY_S:
                raise invalid_field(name, getattr(self, name), "at most 24h after midnight")
        return self

    def _check_cron_window(self) -> None:
        has_span = "end_s" in self.model_fields_set
        if self.duration_s is None and not has_span:
            raise invalid_field("duration_s", None, 'how long each window of `cron` lasts, such as "10h"')
        if self.duration_s is not None and has_span:
            raise invalid_field("duration_s", self.duration_s, "nothing together with end_s; set one of them")
        if not self.start_s < self.span_end_s <= WINDOW_S_MAX:
            name = "end_s" if has_span else "duration_s"
            raise invalid_field(name, getattr(self, name), "more than start_s, and at most 366 days")

    @property
    def span_end_s(self) -> float:
        """End of the window, in seconds after midnight or after the time of the cron expression."""
        return self.end_s if self.duration_s is None else self.start_s + self.duration_s


class KnownEventDocument(Document):
    """A time of unusual demand. The forecast is raised before it begins and while it lasts."""

    name: Annotated[Text, Field(min_length=1, max_length=253)] = Field(
        description="Name of the event. Forecasts and reasons show it."
    )
    start_s: EventStart = Field(description=f"Begin of the event: {START_FORM}.")
    duration_s: PositiveDuration = Field(description='Duration of the event: seconds, or text such as "3h".')
    gpus: Annotated[float, Field(strict=True, ge=0, le=GPUS_MAX)] | None = Field(
        default=None, description="Number of GPUs that inference needs at least. Set this or `factor`."
    )
    factor: Annotated[float, Field(strict=True, ge=1, le=FACTOR_MAX)] | None = Field(
        default=None,
        description=f"Number by which the forecast is multiplied, 1 to {FACTOR_MAX:g}. Set this or `gpus`.",
    )

    @model_validator(mode="after")
    def _check_raise(self) -> Self:
        if (self.gpus is None) == (self.factor is None):
            raise invalid_field(
                "gpus", self.gpus, f"{'nothing together with' if self.factor else 'a value, or'} `factor`"
            )
        return self


def to_blackouts(documents: Sequence[BlackoutDocument]) -> tuple[Blackout, ...]:
    return tuple(Blackout(each.start_s, each.span_end_s, each.cron, each.time_zone) for each in documents)


def to_known_events(documents: Sequence[KnownEventDocument], zone: str) -> tuple[KnownEvent, ...]:
    """Convert events. Starts without an offset are local to `zone`."""
    return tuple(
        KnownEvent(each.name, _to_start_s(each.start_s, zone), each.duration_s, each.gpus, each.factor)
        for each in documents
    )


def _to_start_s(start: float | datetime, zone: str) -> float:
    return start if isinstance(start, float) else to_instant_s(start, zone)
