"""What Prometheus may answer, and what becomes of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.kubernetes.prometheus_demand import QueryValue, parse_query_response, to_demand
from scheduler.kubernetes.resources.fleet import KnownDemand, UnknownDemand, UnknownDemandReason

AT_S = 1_800_000_000.5


def answered(kind: str, result: Any) -> QueryValue | UnknownDemand:
    return parse_query_response(
        200, json.dumps({"status": "success", "data": {"resultType": kind, "result": result}}).encode()
    )


def failed(status: int, kind: str, error: str) -> QueryValue | UnknownDemand:
    return parse_query_response(status, json.dumps({"status": "error", "errorType": kind, "error": error}).encode())


def a_series(text: str) -> dict[str, Any]:
    return {"metric": {"pool": "chat"}, "value": [AT_S, text]}


def test_one_series_and_a_scalar_are_taken() -> None:
    assert answered("vector", [a_series("12.5")]) == QueryValue(12.5, AT_S, is_scalar=False)
    assert answered("scalar", [AT_S, "7"]) == QueryValue(7.0, AT_S, is_scalar=True)


@pytest.mark.parametrize(
    ("found", "gap", "words"),
    [
        (answered("vector", []), UnknownDemandReason.NO_SERIES, "no series"),
        (
            answered("vector", [a_series("1"), a_series("2"), a_series("3")]),
            UnknownDemandReason.MANY_SERIES,
            "3 series",
        ),
        (answered("vector", [a_series("twelve")]), UnknownDemandReason.NOT_A_NUMBER, "'twelve'"),
        (answered("vector", [{"metric": {}, "histogram": [AT_S, {}]}]), UnknownDemandReason.NOT_A_NUMBER, "histogram"),
        (answered("matrix", [{"metric": {}, "values": []}]), UnknownDemandReason.BAD_QUERY, "a matrix"),
        (answered("string", [AT_S, "7"]), UnknownDemandReason.BAD_QUERY, "a string"),
        (failed(400, "bad_data", "parse error: unexpected <by>"), UnknownDemandReason.BAD_QUERY, "parse error"),
        (failed(422, "execution", "many-to-many matching"), UnknownDemandReason.BAD_QUERY, "many-to-many"),
        (failed(503, "timeout", "query timed out"), UnknownDemandReason.UNREACHABLE, "query timed out"),
        (
            parse_query_response(502, b"<html>Bad Gateway</html>"),
            UnknownDemandReason.UNREACHABLE,
            "HTTP status 502 and no JSON",
        ),
        (parse_query_response(200, b"\xff\xfe"), UnknownDemandReason.UNREACHABLE, "no JSON"),
        (parse_query_response(200, b"[" * 100_000), UnknownDemandReason.UNREACHABLE, "no JSON"),
        (
            parse_query_response(404, b'{"detail": "Not Found"}'),
            UnknownDemandReason.UNREACHABLE,
            "HTTP status 404, not as Prometheus does",
        ),
        (parse_query_response(200, b"null"), UnknownDemandReason.UNREACHABLE, "not as Prometheus does"),
    ],
)
def test_everything_else_is_told_with_its_reason(
    found: QueryValue | UnknownDemand, gap: UnknownDemandReason, words: str
) -> None:
    assert isinstance(found, UnknownDemand)
    assert found.reason is gap
    assert words in found.message


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-0.5", "1000001"])
def test_what_is_no_number_of_gpus_is_refused(value: str) -> None:
    figure = answered("vector", [a_series(value)])
    assert isinstance(figure, QueryValue)
    found = to_demand(figure, AT_S)
    assert isinstance(found, UnknownDemand)
    assert found.reason is UnknownDemandReason.NOT_A_NUMBER
    assert "allowed: 0 to 1000000 GPUs" in found.message


def test_a_time_in_milliseconds_is_refused() -> None:
    found = to_demand(QueryValue(5.0, AT_S, is_scalar=False), AT_S * 1000.0)
    assert isinstance(found, UnknownDemand)
    assert "since 1970" in found.message


@given(st.floats(0.0, 1e6), st.floats(0.0, 1e11))
def test_any_number_of_gpus_comes_through_as_it_is(gpus: float, at_s: float) -> None:
    figure = answered("vector", [{"metric": {}, "value": [at_s, repr(gpus)]}])
    assert isinstance(figure, QueryValue)
    assert to_demand(figure, at_s) == KnownDemand(gpus, at_s)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    ),
    st.sampled_from(["vector", "scalar", "matrix"]),
)
def test_no_answer_breaks_the_reader(result: Any, kind: str) -> None:
    assert isinstance(answered(kind, result), QueryValue | UnknownDemand)
