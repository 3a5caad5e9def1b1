"""What Prometheus answers to an instant query, as a number or as what is wrong with it. Pure.

The form of the answer: https://prometheus.io/docs/prometheus/latest/querying/api/
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from scheduler.k8s.demand_reading import Demand, Gap, Known, Unknown

GPUS_MAX = 1e6
TIME_S_MAX = 1e11
"""Seconds since 1970: milliseconds are above it."""
_MESSAGE_CHARACTERS = 500
_OF_THE_QUERY = ("bad_data", "execution")


@dataclass(frozen=True, slots=True)
class Figure:
    """`at_s` is when it was evaluated; a scalar has no sample that could be older."""

    value: float
    at_s: float
    is_scalar: bool


def figure_of(status: int, body: bytes) -> Figure | Unknown:
    """The one number of an answer with this HTTP status, whatever it is a number of."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return Unknown(Gap.UNREACHABLE, f"answers with HTTP status {status} and no JSON")
    match document:
        case {"status": "success", "data": {"resultType": "scalar", "result": [int() | float() as at_s, str(text)]}}:
            return _figure(text, at_s, is_scalar=True)
        case {"status": "success", "data": {"resultType": "vector", "result": list(series)}}:
            return _of_series(series)
        case {"status": "success", "data": {"resultType": str(kind)}}:
            return Unknown(Gap.BAD_QUERY, f"the query gives a {kind[:40]}; allowed: one series or a scalar")
        case {"status": "error", "errorType": str(kind), "error": str(said)}:
            gap = Gap.BAD_QUERY if kind in _OF_THE_QUERY else Gap.UNREACHABLE
            return Unknown(gap, f"{kind[:40]}: {said[:_MESSAGE_CHARACTERS]}")
    return Unknown(Gap.UNREACHABLE, f"answers with HTTP status {status}, not as Prometheus does")


def demand_of(figure: Figure, sampled_at_s: float) -> Known:
    """The number as GPUs. Not finite, negative or beyond any cluster is no number of GPUs."""
    if not 0.0 <= figure.value <= GPUS_MAX:
        return Unknown(Gap.NOT_A_NUMBER, f"the query gives {figure.value:g}; allowed: 0 to {GPUS_MAX:.0f} GPUs")
    if not 0.0 <= sampled_at_s <= TIME_S_MAX:
        return Unknown(Gap.NOT_A_NUMBER, f"a sample of {sampled_at_s:g} s since 1970; allowed: 0 to {TIME_S_MAX:g} s")
    return Demand(figure.value, sampled_at_s)


def _of_series(series: list[object]) -> Figure | Unknown:
    match series:
        case []:
            return Unknown(Gap.NO_SERIES, "the query gives no series; allowed: one series or a scalar")
        case [{"value": [int() | float() as at_s, str(text)]}]:
            return _figure(text, at_s, is_scalar=False)
        case [_]:
            return Unknown(Gap.NOT_A_NUMBER, "the query gives a histogram; allowed: a number of GPUs")
    return Unknown(Gap.MANY_SERIES, f"the query gives {len(series)} series; allowed: one series or a scalar")


def _figure(text: str, at_s: float, *, is_scalar: bool) -> Figure | Unknown:
    try:
        return Figure(float(text), float(at_s), is_scalar)
    except ValueError:
        return Unknown(Gap.NOT_A_NUMBER, f"the query gives {text[:40]!r}; allowed: a number of GPUs")
