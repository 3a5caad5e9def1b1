"""Spans of ticks and jobs, and what of the environment asks for them."""

from __future__ import annotations

from itertools import pairwise

import pytest

from scheduler.telemetry.traces import TickTracer, get_job_span_context, is_tracing_enabled
from tests.golden.stage import Stage

sdk = pytest.importorskip("opentelemetry.sdk.trace")
STAGES = ["observe", "load", "absorb", "decide", "apply", "commit", "converge"]


def test_a_tick_is_a_span_with_a_child_for_each_stage_and_linked_with_its_jobs() -> None:
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    stage = Stage(TickTracer(provider.get_tracer("test")).record)
    for line in ("fleet training=1x4 inference=0x4", "submit a 4..4 gpu-seconds=400", "run 200"):
        stage.play(line)
    spans = kept.get_finished_spans()
    first, *later = [span for span in spans if span.name == "tick"]
    assert len(later) == len({span.context.trace_id for span in later}), "each tick is a trace of its own"
    inside = [span for span in spans if span.parent and span.parent.span_id == first.context.span_id]
    assert [span.name for span in inside] == STAGES
    assert inside[0].start_time == first.start_time
    assert inside[-1].end_time == first.end_time
    assert all(after.start_time == before.end_time for before, after in pairwise(inside))
    own = [span for span in spans if span.context.trace_id == get_job_span_context("a").trace_id]
    told = [(span.name, (span.attributes or {})["ebbtide.cause"]) for span in own]
    assert told[-3:] == [("JobStarted", "FirstInOrder"), ("JobState", "running"), ("JobState", "succeeded")]
    assert {link.context.span_id for link in first.links} <= {span.context.span_id for span in own}
    assert [link.context for link in own[0].links] == [first.context]


def test_without_anybody_who_listens_nothing_is_made() -> None:
    stage = Stage(TickTracer().record)
    for line in ("fleet training=1x4 inference=0x4", "run 10"):
        stage.play(line)


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "x"}, False),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318", "OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_only_the_standard_variables_ask_for_traces(environment: dict[str, str], wanted: bool) -> None:
    assert is_tracing_enabled(environment) is wanted


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER: got 'zipkin'; allowed: otlp, none"),
        (
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL: got 'grpc'; allowed: http/protobuf",
        ),
    ],
)
def test_a_way_that_there_is_not_is_refused_by_name(environment: dict[str, str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        is_tracing_enabled(environment)
