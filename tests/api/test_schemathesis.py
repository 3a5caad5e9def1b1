"""Whatever the OpenAPI document permits, or does not: no 5xx, and nothing answered that it does not tell."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import ignored_auth

from tests.api.seeded import SeededService

CASES = 200
CASES_FULL = 2000
REACHED_RATIO_MIN = 0.6
WELL_FORMED_BUT_REFUSED = ["2xx", "401", "403", "404", "409", "412", "422", "429", "503"]
"""What the document permits may still be refused for what no schema can say, such as a minimum above a maximum."""


@pytest.mark.parametrize("cases", [CASES, pytest.param(CASES_FULL, marks=pytest.mark.full)])
def test_every_operation_keeps_to_the_document(cases: int, tmp_path: Path) -> None:
    seeded = SeededService(tmp_path)
    schema = schemathesis.openapi.from_dict(deepcopy(seeded.service.app.openapi()))
    schema.config.checks.positive_data_acceptance.expected_statuses = WELL_FORMED_BUT_REFUSED
    found = [result.ok() for result in schema.get_all_operations() if isinstance(result, Ok)]
    assert len(found) == len(list(schema.get_all_operations()))
    reached: Counter[str] = Counter()
    for operation in found:
        for mode, share in ((GenerationMode.POSITIVE, 0.7), (GenerationMode.NEGATIVE, 0.3)):
            _try(seeded, operation, mode, max(1, round(share * cases / len(found))), reached)
    names = {operation.definition.raw["operationId"] for operation in found}
    assert len(reached) / len(names) >= REACHED_RATIO_MIN, sorted(names - reached.keys())


def _try(seeded: SeededService, operation: Any, mode: GenerationMode, cases: int, reached: Counter[str]) -> None:
    name = operation.definition.raw["operationId"]

    @seed(1)
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
                case.path_parameters[parameter] = data.draw(st.sampled_from(seeded.known[parameter]))
        if isinstance(case.body, dict) and mode is GenerationMode.POSITIVE and data.draw(st.booleans()):
            content = operation.definition.raw["requestBody"]["content"]
            case.body = content["application/json"]["example"]
        seeded.put_back()
        answer = _send(seeded, case, seeded.headers(name))
        if answer.is_success:
            reached[name] += 1
        # It would send requests of its own; tests/api/test_identity_refusals.py tries every route without a token.
        case.validate_response(answer, excluded_checks=[ignored_auth])

    with suppress(Unsatisfiable):  # there is nothing that could be wrong with a request without parameters
        check()


def _send(seeded: SeededService, case: Any, headers: dict[str, str]) -> httpx.Response:
    asked = case.as_transport_kwargs(base_url="http://service", headers=headers)
    if isinstance(asked.get("data"), bytes | str):
        asked["content"] = asked.pop("data")
    seeded.service.http.cookies = asked.pop("cookies", None) or {}
    answer = seeded.service.http.request(**asked)
    answer.elapsed = timedelta()
    return answer
