"""Views of what a pool's owner knows of its time: blackouts and known events."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from scheduler.documents.pool_calendar import BlackoutDocument, KnownEventDocument

_BLACKOUT = {name: info.description for name, info in BlackoutDocument.model_fields.items()}
_EVENT = {name: info.description for name, info in KnownEventDocument.model_fields.items()}


class BlackoutView(TypedDict):
    """Times without new loans: a daily window, which may wrap around midnight, or windows by a cron expression."""

    start_s: Annotated[
        float,
        Field(description="First second of the window, counted from midnight, or from each time of `cron`."),
    ]
    end_s: Annotated[float, Field(description="Second after the window, counted like its start.")]
    cron: Annotated[str, Field(description=_BLACKOUT["cron"])]
    time_zone: Annotated[str, Field(description=_BLACKOUT["time_zone"])]


class KnownEventView(TypedDict):
    """A time of unusual demand. The forecast is raised before it begins and while it lasts."""

    name: Annotated[str, Field(description=_EVENT["name"])]
    start_s: Annotated[float, Field(description="Begin of the event, in seconds since 1970 (UTC).")]
    duration_s: Annotated[float, Field(description="How long demand is raised, in seconds.")]
    gpus: Annotated[
        float | None, Field(description="Number of GPUs that inference needs at least. Null: see `factor`.")
    ]
    factor: Annotated[float | None, Field(description="Number by which the forecast is multiplied. Null: see `gpus`.")]
