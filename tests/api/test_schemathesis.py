"""Generated requests against the OpenAPI document: no 5xx, and no response that the document does not describe."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import timedelta
from math import ceil
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import ignored_auth

from tests.api.seeded_service import SeededService

schemathesis.serializer.alias("application/gzip", "application/octet-stream")
CASES = 100
CASES_FULL = 2000
VARIED_RATIO = 0.8
"""Share of the operations with parameters or a body; the others are tried only a few times."""
REACHED_RATIO_MIN = 0.6
WELL_FORMED_BUT_REFUSED = ["2xx", "401", "403", "404", "409", "412", "422", "429"]
"""A valid document may still be refused for reasons that no schema can express, such as a minimum above a maximum."""


@dataclass(frozen=True, slots=True)
class Trial:
    """`tried` counts requests by operation, `reached` those answered with a 2xx."""

    seeded: SeededService
    seed: int
    tried: Counter[str] = field(default_factory=Counter)
    reached: Counter[str] = field(default_factory=Counter)


@pytest.mark.parametrize(("cases", "seed"), [(CASES, 1), pytest.param(CASES_FULL, 2, marks=pytest.mark.full)])
def test_every_operation_matches_the_document(cases: int, seed: int, tmp_path: Path) -> None:
    trial = Trial(SeededService(tmp_path), seed)
    schema = schemathesis.openapi.from_dict(_document(trial.seeded))
    schema.config.checks.positive_data_acceptance.expected_statuses = WELL_FORMED_BUT_REFUSED
    operations = [result.ok() for result in schema.get_all_operations() if isinstance(result, Ok)]
    assert len(operations) == len(list(schema.get_all_operations()))
    cases_per_operation = cases / (VARIED_RATIO * len(operations))
    for operation in operations:
        for mode, share in ((GenerationMode.POSITIVE, 0.7), (GenerationMode.NEGATIVE, 0.3)):
            if mode is GenerationMode.POSITIVE or _has_invalid_form(operation):
                _try(trial, operation, mode, ceil(share * cases_per_operation))
    names = {operation.definition.raw["operationId"] for operation in operations}
    assert trial.tried.total() >= cases
    assert len(trial.reached) / len(names) >= REACHED_RATIO_MIN, sorted(names - trial.reached.keys())


def _document(seeded: SeededService) -> dict[str, Any]:
    """Return the document without its security schemes; the test sends the right token itself."""
    document = deepcopy(seeded.service.app.openapi())
    for secured in (document, *(operation for path in document["paths"].values() for operation in path.values())):
        secured.pop("security", None)
    return document


def _try(trial: Trial, operation: Any, mode: GenerationMode, cases: int) -> None:
    seeded, name = trial.seeded, operation.definition.raw["operationId"]

    @seed(trial.seed)
    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode), data=st.data())
    def check(case: Any, data: st.DataObject) -> None:
        for parameter in case.path_parameters or {}:
            if mode is GenerationMode.POSITIVE or data.draw(st.booleans()):
                case.path_parameters[parameter] = data.draw(
                    st.sampled_from(seeded.list_names(operation.path, parameter))
                )
        if isinstance(case.body, dict) and mode is GenerationMode.POSITIVE and data.draw(st.booleans()):
            content = operation.definition.raw["requestBody"]["content"]
            case.body = content["application/json"]["example"]
        seeded.reset()
        answer = _send(seeded, case, seeded.headers(name))
        trial.tried[name] += 1
        if answer.is_success:
            trial.reached[name] += 1
        # `ignored_auth` sends requests of its own; test_route_authorization.py tries every route without a token.
        case.validate_response(answer, excluded_checks=[ignored_auth])

    check()


def _has_invalid_form(operation: Any) -> bool:
    """Return whether a request can break the schema: a JSON body, or a parameter other than a plain path segment."""
    raw = operation.definition.raw
    return "application/json" in raw.get("requestBody", {}).get("content", {}) or any(
        parameter["in"] != "path" for parameter in raw.get("parameters", [])
    )


def _send(seeded: SeededService, case: Any, headers: dict[str, str]) -> httpx.Response:
    request = case.as_transport_kwargs(base_url="http://service", headers=headers)
    if isinstance(request.get("data"), bytes | str):
        request["content"] = request.pop("data")
    seeded.service.http.cookies = request.pop("cookies", None) or {}
    answer = seeded.service.http.request(**request)
    answer.elapsed = timedelta()
    return answer
