"""The solution of a dumped request, which knows numbers and no names, as people read it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from scheduler.cli.humanise import share, size, span
from scheduler.cli.output import columns, facts, stacked
from scheduler.cli.plan_view import proof_text, runs_text

if TYPE_CHECKING:
    from rich.console import RenderableType


def solution_view(answer: Mapping[str, Any]) -> RenderableType:
    """Objective and bound, then one line for each device of the pipeline."""
    from rich.text import Text

    told = {
        "objective": f"{answer['objective_s']:.9g} s",
        "proven bound": f"{answer['bound_s']:.9g} s ({proof_text(answer['optimality_gap'])})",
        "solver": f"{answer['solver']}: {answer['status']}, in {span(answer['search_time_s'])}",
        "instance": f"{answer['instance']} of 0 to {answer['instances'] - 1}",
        "micro-batches": str(answer["micro_batches"]),
    }
    rows = columns(
        _rows(answer),
        heads=["device", "group", "layers", "strategies", "a micro-batch", "memory", "of"],
        right=["device", "group", "a micro-batch", "memory", "of"],
    )
    return stacked(facts(told), Text(), rows)


def _rows(answer: Mapping[str, Any]) -> Iterator[list[str]]:
    devices, chunks = len(answer["order"]), list(pairwise(answer["borders"]))
    for device, group in enumerate(answer["order"]):
        layers = [layer for first, end in chunks[device::devices] for layer in range(first, end)]
        need, limit = answer["memory_bytes"][device], answer["capacity_bytes"][device]
        yield [
            str(device),
            str(group),
            runs_text(layers),
            ", ".join(map(str, dict.fromkeys(answer["choice"][layer] for layer in layers))),
            span(answer["devices_s"][device]),
            size(need),
            f"{size(limit)} ({share(need / limit) if limit else '-'})",
        ]
