"""OpenTelemetry traces, enabled by the standard environment variables OTEL_*.

Each tick is a trace with a child span per stage. Each job is a trace whose id is derived from the job id; each of its
events is a span, linked with the span of the tick in both directions.
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
    """Tell whether an exporter or an endpoint is configured.

    Raises:
        ValueError: the exporter or protocol is not supported; the message names the variable.
    """
    exporter = environment.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if exporter not in ("", "otlp", "none"):
        raise ValueError(f"OTEL_TRACES_EXPORTER is {exporter!r}. Set it to otlp or none")
    is_off = exporter == "none" or environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if is_off or not (exporter or any(environment.get(name) for name in _ENDPOINTS)):
        return False
    name = next((name for name in _PROTOCOLS if environment.get(name)), "")
    if name and environment[name] != "http/protobuf":
        raise ValueError(f"{name} is {environment[name]!r}. Set it to http/protobuf")
    return True


def start_tracing(service: str, environment: Mapping[str, str]) -> None:
    """Send the traces of this process if tracing is enabled.

    Args:
        service: the service name, unless OTEL_SERVICE_NAME is set.

    Raises:
        ValueError: the configuration is not supported, or the packages are not installed.
    """
    if not is_tracing_enabled(environment):
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as missing:
        raise ValueError(
            f"OTEL_*: tracing needs packages that are not installed ({missing}). "
            "Run `pip install 'ebbtide-server[otel]'`"
        ) from missing
    resource = Resource.create() if environment.get("OTEL_SERVICE_NAME") else Resource.create({"service.name": service})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


class TickTracer:
    """Converter of tick reports to spans."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = tracer or trace.get_tracer("ebbtide")

    def record(self, report: TickReport) -> str:
        """Send the spans of a tick, and return the id of its trace, empty if it is not sampled."""
        start_ns = round(report.now_s * _NS)
        span = self._tracer.start_span("tick", context=trace.set_span_in_context(_NO_SPAN), start_time=start_ns)
        if not span.is_recording():
            return ""
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
        return _format_trace_id(span.get_span_context())

    def _add_stage_spans(self, span: Span, report: TickReport, start_ns: int) -> int:
        """Add a child span per stage, one after another, and return the end of the last."""
        context, at_ns = trace.set_span_in_context(span), start_ns
        for stage, seconds in report.stage_s.items():
            child = self._tracer.start_span(stage, context=context, start_time=at_ns)
            at_ns += round(seconds * _NS)
            child.end(at_ns)
        return at_ns

    def _add_event_span(self, tick: Span, event: Event, start_ns: int, end_ns: int) -> None:
        attributes = {"ebbtide.job": event.subject, "ebbtide.message": event.message, "ebbtide.cause": event.cause}
        event_span = self._tracer.start_span(
            event.code.value,
            context=trace.set_span_in_context(NonRecordingSpan(get_job_span_context(event.subject))),
            links=[Link(tick.get_span_context())],
            attributes=attributes,
            start_time=start_ns,
        )
        event_span.end(end_ns)
        tick.add_link(event_span.get_span_context(), {"ebbtide.job": event.subject})


_NO_SPAN = NonRecordingSpan(trace.INVALID_SPAN_CONTEXT)


def get_job_span_context(job_id: str) -> SpanContext:
    """Return the root of a job's trace. Its ids are the first 16 and the next 8 bytes of the SHA-256 of the job id."""
    digest = sha256(job_id.encode()).digest()
    trace_id, span_id = int.from_bytes(digest[:16]), int.from_bytes(digest[16:24])
    return SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def get_job_trace_id(job_id: str) -> str:
    """Return the id of a job's trace in hexadecimal."""
    return _format_trace_id(get_job_span_context(job_id))


def get_current_trace_id() -> str:
    """Return the id of the current span's trace in hexadecimal, empty without a sampled span."""
    context = trace.get_current_span().get_span_context()
    return _format_trace_id(context) if context.is_valid and context.trace_flags.sampled else ""


def _format_trace_id(context: SpanContext) -> str:
    return trace.format_trace_id(context.trace_id)
