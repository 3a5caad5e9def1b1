"""Spans of ticks and jobs, and the environment variables that enable them."""

from __future__ import annotations

from itertools import pairwise

import pytest

from scheduler.telemetry.traces import TickTracer, get_job_span_context, is_tracing_enabled
from tests.golden.stage import Stage

sdk = pytest.importorskip("opentelemetry.sdk.trace")
STAGES = ["observe", "load", "absorb", "decide", "apply", "commit", "converge"]


def test_tick_span_has_a_child_per_stage_and_links_to_its_jobs() -> None:
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    stage = Stage(TickTracer(provider.get_tracer("test")).record)
    for line in ("fleet training=1x4 inference=0x4", "submit a 4..4 gpu-seconds=400", "run 200"):
        stage.play(line)
    spans = exporter.get_finished_spans()
    first, *later = [span for span in spans if span.name == "tick"]
    assert len(later) == len({span.context.trace_id for span in later}), "each tick has its own trace"
    children = [span for span in spans if span.parent and span.parent.span_id == first.context.span_id]
    assert [span.name for span in children] == STAGES
    assert children[0].start_time == first.start_time
    assert children[-1].end_time == first.end_time
    assert all(after.start_time == before.end_time for before, after in pairwise(children))
    job_spans = [span for span in spans if span.context.trace_id == get_job_span_context("a").trace_id]
    causes = [(span.name, (span.attributes or {})["ebbtide.cause"]) for span in job_spans]
    assert causes[-3:] == [("JobStarted", "FirstInOrder"), ("JobState", "running"), ("JobState", "succeeded")]
    assert {link.context.span_id for link in first.links} <= {span.context.span_id for span in job_spans}
    assert [link.context for link in job_spans[0].links] == [first.context]


def test_tracer_without_an_exporter_does_nothing() -> None:
    stage = Stage(TickTracer().record)
    for line in ("fleet training=1x4 inference=0x4", "run 10"):
        stage.play(line)


@pytest.mark.parametrize(
    ("environment", "enabled"),
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
def test_standard_variables_enable_tracing(environment: dict[str, str], enabled: bool) -> None:
    assert is_tracing_enabled(environment) is enabled


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER .*'zipkin'.* otlp or none"),
        (
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL .*'grpc'.* http/protobuf",
        ),
    ],
)
def test_error_names_the_unsupported_variable(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        is_tracing_enabled(environment)
