"""Traces by OpenTelemetry, for who asks for them by the standard environment variables OTEL_*, and nobody else.

A tick is a span with a child for each stage. A job has a trace of its own, whose id follows from the job's: each event
of the job is a span in it, and such spans and the tick's are linked both ways. Requests are traced by FastAPI itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

from opentelemetry import trace
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, TraceFlags, Tracer

from scheduler.domain.events import Event
from scheduler.domain.tick_report import TickReport

_NS = 1_000_000_000
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def is_tracing_enabled(environment: Mapping[str, str]) -> bool:
    """Whether traces are to be sent: an exporter or an endpoint is named.

    Raises:
        ValueError: they are to be sent in a way that there is not; the message names the variable.
    """
    exporter = environment.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if exporter not in ("", "otlp", "none"):
        raise ValueError(f"OTEL_TRACES_EXPORTER: got {exporter!r}; allowed: otlp, none")
    is_off = exporter == "none" or environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if is_off or not (exporter or any(environment.get(name) for name in _ENDPOINTS)):
        return False
    name = next((name for name in _PROTOCOLS if environment.get(name)), "")
    if name and environment[name] != "http/protobuf":
        raise ValueError(f"{name}: got {environment[name]!r}; allowed: http/protobuf")
    return True


def start_tracing(service: str, environment: Mapping[str, str]) -> None:
    """Send this process's traces, as `service` unless OTEL_SERVICE_NAME says otherwise, if they are wanted.

    Raises:
        ValueError: as `traces_wanted`, or the packages for it are not installed.
    """
    if not is_tracing_enabled(environment):
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as missing:
        raise ValueError(f"OTEL_*: traces need `pip install 'ebbtide[otel]'`: {missing}") from missing
    named = Resource.create() if environment.get("OTEL_SERVICE_NAME") else Resource.create({"service.name": service})
    provider = TracerProvider(resource=named)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


class TickTracer:
    """Turns tick reports into spans, at the times that the reports tell."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = tracer or trace.get_tracer("ebbtide")

    def record(self, report: TickReport) -> None:
        start_ns = round(report.now_s * _NS)
        span = self._tracer.start_span("tick", context=trace.set_span_in_context(_NO_SPAN), start_time=start_ns)
        if not span.is_recording():
            return
        end_ns = self._add_stage_spans(span, report, start_ns)
        span.set_attributes(
            {
                "ebbtide.generation": report.generation,
                "ebbtide.committed": report.committed,
                "ebbtide.full_pass": report.full_pass,
                "ebbtide.decisions": len(report.decisions),
                "ebbtide.events": len(report.events),
                "ebbtide.jobs_waiting": len(report.waiting),
            }
        )
        for event in report.events:
            if event.subject in report.after.jobs:
                self._add_event_span(span, event, start_ns, end_ns)
        span.end(end_ns)

    def _add_stage_spans(self, span: Span, report: TickReport, start_ns: int) -> int:
        """A child for each stage, one after the other; gives the end of the last."""
        inside, at_ns = trace.set_span_in_context(span), start_ns
        for stage, seconds in report.stage_s.items():
            child = self._tracer.start_span(stage, context=inside, start_time=at_ns)
            at_ns += round(seconds * _NS)
            child.end(at_ns)
        return at_ns

    def _add_event_span(self, tick: Span, event: Event, start_ns: int, end_ns: int) -> None:
        about = {"ebbtide.job": event.subject, "ebbtide.message": event.message, "ebbtide.cause": event.cause}
        own = self._tracer.start_span(
            event.code.value,
            context=trace.set_span_in_context(NonRecordingSpan(get_job_span_context(event.subject))),
            links=[Link(tick.get_span_context())],
            attributes=about,
            start_time=start_ns,
        )
        own.end(end_ns)
        tick.add_link(own.get_span_context(), {"ebbtide.job": event.subject})


_NO_SPAN = NonRecordingSpan(trace.INVALID_SPAN_CONTEXT)


def get_job_span_context(job_id: str) -> SpanContext:
    """The root of a job's trace: its ids are the first 16 and the next 8 bytes of the SHA-256 of the job's id."""
    digest = sha256(job_id.encode()).digest()
    trace_id, span_id = int.from_bytes(digest[:16]), int.from_bytes(digest[16:24])
    return SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
