"""SaveWish: the owner of a running job wants a checkpoint now, not when its interval is over."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SaveWish:
    """To the workers of `generation`. `steps`: as many as they had done when the wish was first seen beside them, at
    least 1; None before that. A checkpoint of so many steps or more grants it."""

    asked_at_s: float
    generation: int
    steps: float | None = None
