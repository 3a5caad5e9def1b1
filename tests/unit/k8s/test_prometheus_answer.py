"""What Prometheus may answer, and what becomes of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.k8s.demand_reading import Demand, Gap, Unknown
from scheduler.k8s.prometheus_answer import Figure, demand_of, figure_of

AT_S = 1_800_000_000.5


def answered(kind: str, result: Any) -> Figure | Unknown:
    return figure_of(200, json.dumps({"status": "success", "data": {"resultType": kind, "result": result}}).encode())


def failed(status: int, kind: str, error: str) -> Figure | Unknown:
    return figure_of(status, json.dumps({"status": "error", "errorType": kind, "error": error}).encode())


def a_series(text: str) -> dict[str, Any]:
    return {"metric": {"pool": "chat"}, "value": [AT_S, text]}


def test_one_series_and_a_scalar_are_taken() -> None:
    assert answered("vector", [a_series("12.5")]) == Figure(12.5, AT_S, is_scalar=False)
    assert answered("scalar", [AT_S, "7"]) == Figure(7.0, AT_S, is_scalar=True)


@pytest.mark.parametrize(
    ("found", "gap", "words"),
    [
        (answered("vector", []), Gap.NO_SERIES, "no series"),
        (answered("vector", [a_series("1"), a_series("2"), a_series("3")]), Gap.MANY_SERIES, "3 series"),
        (answered("vector", [a_series("twelve")]), Gap.NOT_A_NUMBER, "'twelve'"),
        (answered("vector", [{"metric": {}, "histogram": [AT_S, {}]}]), Gap.NOT_A_NUMBER, "histogram"),
        (answered("matrix", [{"metric": {}, "values": []}]), Gap.BAD_QUERY, "a matrix"),
        (answered("string", [AT_S, "7"]), Gap.BAD_QUERY, "a string"),
        (failed(400, "bad_data", "parse error: unexpected <by>"), Gap.BAD_QUERY, "parse error"),
        (failed(422, "execution", "many-to-many matching"), Gap.BAD_QUERY, "many-to-many"),
        (failed(503, "timeout", "query timed out"), Gap.UNREACHABLE, "query timed out"),
        (figure_of(502, b"<html>Bad Gateway</html>"), Gap.UNREACHABLE, "HTTP status 502 and no JSON"),
        (figure_of(200, b"\xff\xfe"), Gap.UNREACHABLE, "no JSON"),
        (figure_of(200, b"[" * 100_000), Gap.UNREACHABLE, "no JSON"),
        (figure_of(404, b'{"detail": "Not Found"}'), Gap.UNREACHABLE, "HTTP status 404, not as Prometheus does"),
        (figure_of(200, b"null"), Gap.UNREACHABLE, "not as Prometheus does"),
    ],
)
def test_everything_else_is_told_with_its_reason(found: Figure | Unknown, gap: Gap, words: str) -> None:
    assert isinstance(found, Unknown)
    assert found.gap is gap
    assert words in found.message


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-0.5", "1000001"])
def test_what_is_no_number_of_gpus_is_refused(value: str) -> None:
    figure = answered("vector", [a_series(value)])
    assert isinstance(figure, Figure)
    found = demand_of(figure, AT_S)
    assert isinstance(found, Unknown)
    assert found.gap is Gap.NOT_A_NUMBER
    assert "allowed: 0 to 1000000 GPUs" in found.message


def test_a_time_in_milliseconds_is_refused() -> None:
    found = demand_of(Figure(5.0, AT_S, is_scalar=False), AT_S * 1000.0)
    assert isinstance(found, Unknown)
    assert "since 1970" in found.message


@given(st.floats(0.0, 1e6), st.floats(0.0, 1e11))
def test_any_number_of_gpus_comes_through_as_it_is(gpus: float, at_s: float) -> None:
    figure = answered("vector", [{"metric": {}, "value": [at_s, repr(gpus)]}])
    assert isinstance(figure, Figure)
    assert demand_of(figure, at_s) == Demand(gpus, at_s)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    ),
    st.sampled_from(["vector", "scalar", "matrix"]),
)
def test_no_answer_breaks_the_reader(result: Any, kind: str) -> None:
    assert isinstance(answered(kind, result), Figure | Unknown)
