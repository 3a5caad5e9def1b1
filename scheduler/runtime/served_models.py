"""Checks of the models that pools serve, and demand from requests for them, with errors that name document fields."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scheduler.documents.document import InvalidDocumentError, InvalidField, to_printable
from scheduler.domain.commands import ReportDemand
from scheduler.domain.fleet import Forecast, Pool
from scheduler.domain.serving import ModelLoad, ReportedRequests, ServedModel
from scheduler.serving.capacity import CapacityError
from scheduler.serving.served_models import ServedModelError, check_served_model, size_requests


def check_served_models(models: Iterable[ServedModel]) -> None:
    """Check that each model can meet its objective.

    Raises:
        InvalidDocumentError: a model or GPU is unknown, the weights do not fit, the measurements cannot be, or an idle
            replica misses the objective.
    """
    for number, served in enumerate(models):
        try:
            check_served_model(served)
        except ServedModelError as error:
            field = f"serving.{number}.{error.field}".rstrip(".")
            raise InvalidDocumentError(InvalidField(field, error.value or served.model, str(error))) from None


def build_demand_report(
    pool: Pool, reported: Sequence[ReportedRequests], forecast: Forecast | None, now_s: float
) -> ReportDemand:
    """Return the demand that follows from the requests for all models of a pool.

    Args:
        forecast: the newest one of the pool, for the rates expected within the start of a replica.

    Raises:
        InvalidDocumentError: a model is missing, unknown or named twice, has no lengths, or cannot be served at its
            rate. The message names the figure that binds.
    """
    _check_names(pool, reported)
    models = {each.model: each for each in pool.serving}
    loads = list[ModelLoad]()
    for number, requests in enumerate(reported):
        served, ahead_rate_per_s = models[requests.model], requests.rate_per_s
        if forecast is not None:
            ahead_rate_per_s = forecast.find_rate(requests.model, requests.rate_per_s, now_s)
        try:
            loads.append(size_requests(served, requests, ahead_rate_per_s))
        except ServedModelError as error:
            field = f"requests.{number}.{error.field}".rstrip(".")
            raise InvalidDocumentError(InvalidField(field, error.value or None, str(error))) from None
        except CapacityError as error:
            field = f"requests.{number}.rate"
            raise InvalidDocumentError(InvalidField(field, to_printable(requests.rate_per_s), str(error))) from None
    return ReportDemand.of_loads(pool.name, loads)


def _check_names(pool: Pool, reported: Sequence[ReportedRequests]) -> None:
    known, seen = [each.model for each in pool.serving], set[str]()
    for number, each in enumerate(reported):
        if each.model not in known or each.model in seen:
            allowed = f"each model of the pool once: {', '.join(known) or 'it serves none; set them first'}"
            raise InvalidDocumentError(InvalidField(f"requests.{number}.model", to_printable(each.model), allowed))
        seen.add(each.model)
    if missing := [name for name in known if name not in seen]:
        allowed = f"all models of the pool; {', '.join(missing)} is missing. Give rate 0 for a model without requests"
        raise InvalidDocumentError(InvalidField("requests", ", ".join(sorted(seen)), allowed))
