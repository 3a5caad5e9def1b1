"""What ranks have printed, as answers."""

from __future__ import annotations

from typing_extensions import TypedDict


class LogLineView(TypedDict):
    """`cursor` is the place behind it. `cut`: the line is too long for one item and goes on in the next."""

    generation: int
    rank: int
    text: str
    cut: bool
    cursor: str


class LogPageView(TypedDict):
    """`dropped_bytes` were printed before the first line and are no longer kept. `next` leads to more that is there
    now, `resume` to what comes later."""

    job_id: str
    generations: list[int]
    items: list[LogLineView]
    dropped_bytes: int
    next: str | None
    resume: str
