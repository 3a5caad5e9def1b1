"""A Galvatron profile, solved and judged under Galvatron's own cost model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from scheduler.cli.failure import blaming, refuse
from scheduler.cli.plan_options import MemoryReading
from scheduler.solver.galvatron.answer import galvatron_answer
from scheduler.solver.galvatron.setting import CapReading

Json = dict[str, Any]


def solved_galvatron(folder: str, plan_file: str | None, reading: MemoryReading) -> Json:
    """Our plan in the contract's form; beside it the profile's facts in `galvatron`, and the `given` plan.

    Raises:
        BadInput: the folder or the plan cannot be used.
    """
    if not Path(folder).is_dir():
        refuse(f"--galvatron: {folder} is not a folder; it must hold a profile's JSON files and spec.json")
    started_s = time.perf_counter()
    with blaming(f"--galvatron {folder}"):
        answer = galvatron_answer(Path(folder), CapReading(reading.value), Path(plan_file) if plan_file else None)
    took = {"search_time_s": time.perf_counter() - started_s, "candidates": answer.pop("candidates")}
    plans = {name: answer.pop(name) for name in ("infeasible", "constraint", "given") if name in answer}
    return {**answer.pop("ours", {}), **plans, **took, "galvatron": answer}
