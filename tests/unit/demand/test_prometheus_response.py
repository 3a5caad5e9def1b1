"""Parsing of Prometheus responses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.demand.prometheus_api import QueryValue, parse_query_values, parse_range_response, to_demand
from scheduler.domain.demand_source import KnownDemand, UnknownDemand, UnknownDemandReason

AT_S = 1_800_000_000.5


def parse_query_response(status: int, body: bytes) -> QueryValue | UnknownDemand:
    values = parse_query_values(status, body)
    return values if isinstance(values, UnknownDemand) else values[0]


def parse_success(kind: str, result: Any) -> QueryValue | UnknownDemand:
    return parse_query_response(
        200, json.dumps({"status": "success", "data": {"resultType": kind, "result": result}}).encode()
    )


def parse_failure(status: int, kind: str, error: str) -> QueryValue | UnknownDemand:
    return parse_query_response(status, json.dumps({"status": "error", "errorType": kind, "error": error}).encode())


def build_series(text: str) -> dict[str, Any]:
    return {"metric": {"pool": "chat"}, "value": [AT_S, text]}


def test_one_series_or_a_scalar_is_accepted() -> None:
    assert parse_success("vector", [build_series("12.5")]) == QueryValue(12.5, AT_S, is_scalar=False)
    assert parse_success("scalar", [AT_S, "7"]) == QueryValue(7.0, AT_S, is_scalar=True)


@pytest.mark.parametrize(
    ("found", "gap", "words"),
    [
        (parse_success("vector", []), UnknownDemandReason.NO_SERIES, "no series"),
        (
            parse_success("vector", [build_series("1"), build_series("2"), build_series("3")]),
            UnknownDemandReason.MANY_SERIES,
            "3 series",
        ),
        (parse_success("vector", [build_series("twelve")]), UnknownDemandReason.NOT_A_NUMBER, "'twelve'"),
        (
            parse_success("vector", [{"histogram": [AT_S, {}]}]),
            UnknownDemandReason.NOT_A_NUMBER,
            "histogram",
        ),
        (parse_success("matrix", [{"metric": {}, "values": []}]), UnknownDemandReason.BAD_QUERY, "a matrix"),
        (parse_success("string", [AT_S, "7"]), UnknownDemandReason.BAD_QUERY, "a string"),
        (parse_failure(400, "bad_data", "parse error: unexpected <by>"), UnknownDemandReason.BAD_QUERY, "parse error"),
        (parse_failure(422, "execution", "many-to-many matching"), UnknownDemandReason.BAD_QUERY, "many-to-many"),
        (parse_failure(503, "timeout", "query timed out"), UnknownDemandReason.UNREACHABLE, "query timed out"),
        (
            parse_query_response(502, b"<html>Bad Gateway</html>"),
            UnknownDemandReason.UNREACHABLE,
            "502",
        ),
        (parse_query_response(200, b"\xff\xfe"), UnknownDemandReason.UNREACHABLE, "200"),
        (parse_query_response(200, b"[" * 100_000), UnknownDemandReason.UNREACHABLE, "200"),
        (
            parse_query_response(404, b'{"detail": "Not Found"}'),
            UnknownDemandReason.UNREACHABLE,
            "404",
        ),
        (parse_query_response(200, b"null"), UnknownDemandReason.UNREACHABLE, "200"),
    ],
)
def test_other_responses_are_rejected_with_a_reason(
    found: QueryValue | UnknownDemand, gap: UnknownDemandReason, words: str
) -> None:
    assert isinstance(found, UnknownDemand)
    assert found.reason is gap
    assert words in found.message


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-0.5", "1000001"])
def test_value_outside_the_range_is_rejected(value: str) -> None:
    figure = parse_success("vector", [build_series(value)])
    assert isinstance(figure, QueryValue)
    found = to_demand(figure, AT_S)
    assert isinstance(found, UnknownDemand)
    assert found.reason is UnknownDemandReason.NOT_A_NUMBER
    assert "1000000" in found.message


def test_time_in_milliseconds_is_rejected() -> None:
    found = to_demand(QueryValue(5.0, AT_S, is_scalar=False), AT_S * 1000.0)
    assert isinstance(found, UnknownDemand)
    assert "since 1970" in found.message


def test_several_series_are_returned_if_they_are_summed() -> None:
    document = {"status": "success", "data": {"resultType": "vector", "result": [build_series("1"), build_series("2")]}}
    values = parse_query_values(200, json.dumps(document).encode(), sums_series=True)
    assert not isinstance(values, UnknownDemand)
    assert [each.value for each in values] == [1.0, 2.0]


def parse_matrix(*series: list[list[Any]], sums_series: bool = False) -> dict[float, float] | UnknownDemand:
    result = [{"metric": {}, "values": samples} for samples in series]
    document = {"status": "success", "data": {"resultType": "matrix", "result": result}}
    return parse_range_response(200, json.dumps(document).encode(), sums_series=sums_series)


def test_range_is_a_sum_by_time_without_values_that_are_not_finite() -> None:
    assert parse_matrix([[100, "1"], [400, "NaN"], [700.0, "3"]]) == {100.0: 1.0, 700.0: 3.0}
    two = [[100, "1"], [400, "2"]], [[400, "5"]]
    assert parse_matrix(*two, sums_series=True) == {100.0: 1.0, 400.0: 7.0}
    found = parse_matrix(*two)
    assert isinstance(found, UnknownDemand)
    assert found.reason is UnknownDemandReason.MANY_SERIES
    assert parse_matrix() == {}


@given(st.floats(0.0, 1e6), st.floats(0.0, 1e11))
def test_valid_values_are_unchanged(gpus: float, at_s: float) -> None:
    figure = parse_success("vector", [{"metric": {}, "value": [at_s, repr(gpus)]}])
    assert isinstance(figure, QueryValue)
    assert to_demand(figure, at_s) == KnownDemand(gpus, at_s)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    ),
    st.sampled_from(["vector", "scalar", "matrix"]),
)
def test_parser_never_raises(result: Any, kind: str) -> None:
    assert isinstance(parse_success(kind, result), QueryValue | UnknownDemand)
