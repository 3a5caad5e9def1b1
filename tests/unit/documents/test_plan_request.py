"""Plan requests and shape files."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.documents.document import InvalidDocumentError, parse_document
from scheduler.documents.plan_request import PlanRequestDocument, parse_gpu_shape, to_gpu_shape
from scheduler.domain.gpu_sets import GpuGroup, GpuShape


def parse_request(**fields: Any) -> PlanRequestDocument:
    return parse_document(PlanRequestDocument, {"model": "gpt2", "globalBatch": 8, **fields})


@pytest.mark.parametrize(
    ("fields", "groups"),
    [
        ({"gpu": "cpu", "gpus": 3}, (GpuGroup("cpu", 1, 3),)),
        ({"gpu": "cpu", "gpus": 16}, (GpuGroup("cpu", 2, 8),)),
        ({"gpu": "cpu", "gpus": 12}, (GpuGroup("cpu", 1, 8), GpuGroup("cpu", 1, 4))),
        ({"gpu": "cpu", "gpus": 16, "nodes": 4}, (GpuGroup("cpu", 4, 4),)),
        (
            {"shape": [{"gpu": "b", "nodes": 1, "gpusPerNode": 1}, {"gpu": "a", "nodes": 2, "gpusPerNode": 3}]},
            (GpuGroup("a", 2, 3), GpuGroup("b", 1, 1)),
        ),
    ],
)
def test_gpus_are_packed_unless_the_request_sets_nodes(fields: dict[str, Any], groups: tuple[GpuGroup, ...]) -> None:
    assert to_gpu_shape(parse_request(**fields)) == GpuShape(groups)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("gpu", {"gpus": 4}),
        ("gpus", {"gpu": "cpu"}),
        ("nodes", {"gpu": "cpu", "gpus": 4, "nodes": 3}),
        ("gpus", {"gpus": 4, "shape": [{"gpu": "a", "nodes": 1, "gpusPerNode": 4}]}),
        ("model", {"gpu": "cpu", "gpus": 4, "profile": {"name": "mine"}}),
        ("shape.0.nodes", {"shape": [{"gpu": "a", "nodes": 0, "gpusPerNode": 4}]}),
    ],
)
def test_incomplete_or_contradictory_request_is_rejected(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidDocumentError) as caught:
        parse_request(**fields)
    assert [invalid.field for invalid in caught.value.invalid_fields] == [field]


def test_custom_profile_becomes_canonical_json() -> None:
    document = {"profile": {"b": 1, "a": [2]}, "globalBatch": 8, "gpu": "cpu", "gpus": 1}
    assert parse_document(PlanRequestDocument, document).profile_json == '{"a": [2], "b": 1}'


ROWS = [{"gpu": "b", "nodes": 1, "gpus_per_node": 1}, {"gpu": "a", "nodes": 2, "gpusPerNode": 3}]


@pytest.mark.parametrize("document", [ROWS, {"groups": ROWS}])
def test_shape_file_is_a_list_of_groups_in_either_spelling(document: object) -> None:
    assert parse_gpu_shape(document) == GpuShape((GpuGroup("a", 2, 3), GpuGroup("b", 1, 1)))


@pytest.mark.parametrize(
    ("field", "document"),
    [
        ("groups", None),
        ("groups", "a100"),
        ("groups", []),
        ("groups", {"gpus": 4}),
        ("groups.0", ["a100"]),
        ("groups.0.gpus", [{"gpu": "a", "gpus": 4}]),
        ("groups.0.gpusPerNode", [{"gpu": "a", "nodes": 1}]),
        ("groups.0.gpusPerNode", [{"gpu": "a", "nodes": 1, "gpus_per_node": 0}]),
        ("groups.1.nodes", [ROWS[0], {"gpu": "a", "nodes": 1.5, "gpus_per_node": 1}]),
        ("groups", [ROWS[0]] * 17),
    ],
)
def test_invalid_shape_file_is_rejected_by_field(field: str, document: object) -> None:
    with pytest.raises(InvalidDocumentError) as caught:
        parse_gpu_shape(document)
    assert [invalid.field for invalid in caught.value.invalid_fields][:1] == [field]
