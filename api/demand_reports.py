"""The report of a pool's inference demand, in GPUs or in requests."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from api.state import RequestContext
from scheduler.documents.document import Document, Text, invalid_field
from scheduler.documents.fleet import describe_as_number
from scheduler.documents.serving import LENGTHS_MAX, SERVED_MODELS_MAX, LengthDocument, to_request_lengths
from scheduler.domain.commands import ReportDemand
from scheduler.domain.serving import RATE_MAX
from scheduler.runtime.served_models import build_demand_report
from scheduler.serving.served_models import ReportedRequests

GPUS_MAX = 1e9
BURSTINESS_MIN, BURSTINESS_MAX = 0.01, 100.0


class RequestsDocument(Document):
    """Requests for one model of a pool."""

    model: Text = Field(description="Name of a model that the pool serves.")
    rate: Annotated[float, Field(strict=True, ge=0, le=RATE_MAX)] = Field(description="Requests per second.")
    lengths: Annotated[list[LengthDocument], Field(max_length=LENGTHS_MAX)] = Field(
        default_factory=list, description="Histogram of the lengths of requests. Empty: that of the pool."
    )
    burstiness: Annotated[float, Field(strict=True, ge=BURSTINESS_MIN, le=BURSTINESS_MAX)] = Field(
        default=1.0, description="Squared coefficient of variation of the times between requests. 1: Poisson."
    )


class DemandReport(Document):
    """A reading of what the inference of a pool needs: GPUs, or requests for each model that it serves."""

    gpus: Annotated[float, Field(strict=True, ge=0, le=GPUS_MAX)] | None = Field(
        default=None,
        description="Number of GPUs needed from time `at` on. Omit it to give `requests`.",
        json_schema_extra=describe_as_number,
    )
    at: Annotated[float, Field(strict=True, ge=0)] | None = Field(
        default=None, description="Time of the reading, in seconds since 1970 (UTC). Null: now."
    )
    requests: Annotated[list[RequestsDocument], Field(min_length=1, max_length=SERVED_MODELS_MAX)] | None = Field(
        default=None, description="Requests for each model of the pool, instead of `gpus`."
    )

    @model_validator(mode="after")
    def _check_one_form(self) -> Self:
        if (self.gpus is None) == (self.requests is None):
            raise invalid_field("gpus", self.gpus, "either gpus or requests, and not both")
        return self


def build_report(report: DemandReport, context: RequestContext, name: str) -> ReportDemand:
    """Return the command of a report for an inference pool; raises InvalidDocumentError as `build_demand_report`."""
    if report.requests is None:
        assert report.gpus is not None
        return ReportDemand(name, report.gpus)
    reported = [_to_reported_requests(each) for each in report.requests]
    return build_demand_report(context.pool(name), reported, context.snapshot.forecasts.get(name), context.now_s)


def _to_reported_requests(document: RequestsDocument) -> ReportedRequests:
    lengths = to_request_lengths(document.lengths)
    return ReportedRequests(document.model, document.rate, document.burstiness, lengths)
