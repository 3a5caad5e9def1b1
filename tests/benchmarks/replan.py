"""Planned re-plans of a real training: time from the last step of the old plan to the first step of the new one.

Setup: a service, a node agent, two nodes with two slots, and the reference trainer with 20 million parameters. The job
is scaled up and down. Each time is measured between the ledger entries of the last step of the old generation and the
first step of the new one. `cold` uses a command that only a new interpreter can run. Targets: 3 s warm and 25 s cold,
for 4 processes on 2 cores.

One row per phase follows, reported by the slowest rank (`ebbtide_replan_phase_seconds`). `between` is time outside all
phases: observed exits, the tick, orders to the agent. During `notice` the ranks still make the step up to the
boundary, so a re-plan takes `notice` plus the time without a step. The last rows are the bytes that the ranks read
(`replan_bytes`) and the time for which a background checkpoint blocks training.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from scheduler.domain.commands import AddNode, CreatePool, ScaleJob, SubmitJob
from scheduler.domain.fleet import Pool, PoolKind
from scheduler.domain.job_records import SHUTDOWN_PHASES, STARTUP_PHASES, LoadTraffic, ReplanPhase
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.job_state import JobState
from scheduler.domain.observation import RankStatus
from scheduler.executors.rank_status import read_rank_status
from scheduler.executors.run_outcome import find_longest_phases_s
from scheduler.resharding.placement import Placement
from scheduler.store.sql_store import SqlStore
from tests.benchmarks import replan_bytes
from tests.builders import a_node
from tests.e2e.service_harness import ServiceHarness, run_service

MODEL = "wide-gpt"
WIDTHS = {"warm": (3, 4, 2, 4, 1, 4, 3, 2, 4, 2, 4, 3), "cold": (3, 4, 2, 4)}
STEPS_BETWEEN = 6
SAVE_EVERY = 3
LOOK_S = 0.004
PATIENCE_S = 180.0
BARS_S = {"warm": 3.0, "cold": 25.0}
INTERPRETERS = {"warm": ("python",), "cold": (sys.executable,)}

PAUSE, BETWEEN = "pause", "between"

Row = tuple[str, str, str]


def rows() -> Iterator[Row]:
    """Return (name, target, measured) for warm and for cold processes, each with its phases."""
    held_up_s: list[float] = []
    loads: list[LoadTraffic] = []
    placements: list[Placement] = []
    for kind, bar_s in BARS_S.items():
        with tempfile.TemporaryDirectory() as folder:
            found, told, seated = measure(Path(folder), kind)
            if kind == "warm":
                loads, placements = told, seated
            held_up_s += _checkpoint_stall_s(Path(folder))
        totals = [one[PAUSE] for one in found]
        widths = "->".join(map(str, (4, *WIDTHS[kind])))
        yield (
            f"re-plan {kind}, {MODEL}, {widths} processes",
            f"{bar_s:g} s",
            f"median {median(totals):.2f} s, worst {max(totals):.2f} s (each: {', '.join(f'{s:.2f}' for s in totals)})",
        )
        yield from _phase_rows(kind, found)
    yield from replan_bytes.rows(MODEL, loads, placements)
    held_up = f"median {median(held_up_s):.3f} s, worst {max(held_up_s):.3f} s of {len(held_up_s)}"
    yield f"training held up by a save in the background, {MODEL}", "0.2 s", held_up


def _phase_rows(kind: str, found: Sequence[Mapping[str, float]]) -> Iterator[Row]:
    """Return one row per phase. Shares are of the total time of all re-plans, so that they add up."""
    whole_s = sum(one[ReplanPhase.NOTICE] + one[PAUSE] for one in found)
    for phase in (*ReplanPhase, BETWEEN):
        spent = [one[phase] for one in found]
        share = sum(spent) / whole_s
        name = f"re-plan {kind}: {phase.replace('_', ' ')}"
        yield name, "", f"median {median(spent):.2f} s, worst {max(spent):.2f} s, {share:.1%} of the whole"


def measure(folder: Path, kind: str) -> tuple[list[dict[str, float]], list[LoadTraffic], list[Placement]]:
    """Return the seconds of each re-plan in total and by phase, the bytes read, and the rank placements."""
    with run_service(folder) as site:
        placements: list[Placement] = []
        spans = list(_replans(site, kind, placements))
        return spans, replan_bytes.loads(site.store), placements


def _replans(site: ServiceHarness, kind: str, placements: list[Placement]) -> Iterator[dict[str, float]]:
    folder, store = site.shared, site.store
    site.send(CreatePool(Pool("training", PoolKind.TRAINING)))
    for name in ("t0", "t1"):
        site.send(AddNode(a_node(name, gpus=2, gpu="cpu")))
    saving = ("--checkpoint-every", str(SAVE_EVERY))
    trainer = ("-m", "scheduler.trainer.train", "--model", MODEL, *saving, "--ledger", str(folder / "ledger"))
    spec = JobSpec(
        name="job", min_gpus=4, max_gpus=4, model=MODEL, global_batch=12, steps=100_000,
        command=(*INTERPRETERS[kind], *trainer),
    )  # fmt: skip
    site.send(SubmitJob("job", spec))
    generation, since = _first_step(folder, after=0)
    placements.append(replan_bytes.placement(store))
    for number, width in enumerate(WIDTHS[kind], 1):
        _wait(partial(_has_reached, folder, generation, since + STEPS_BETWEEN))
        _wait(partial(_is_running, store))
        site.send(ScaleJob("job", width, width))
        old = generation
        generation, since = _first_step(folder, after=old)
        yield _spans(site, old, generation)
        placements.append(replan_bytes.placement(store))
        _wait(partial(_has_reported, store, number))
    site.send(ScaleJob("job", 1, 1))


def _spans(site: ServiceHarness, old: int, new: int) -> dict[str, float]:
    """Return the seconds of one re-plan: of each phase, between them, and without a step."""
    ledger = site.shared / "ledger"
    pause_s = _time(ledger / f"losses-g{new}.jsonl") - _time(ledger / f"losses-g{old}.jsonl")
    # A rank writes down what its first step took a moment after the step stands in the ledger.
    _wait(lambda: all(ReplanPhase.FIRST_STEP in status.phases_s for status in _statuses(site, new)))
    left, came = (
        find_longest_phases_s(_statuses(site, old)),
        find_longest_phases_s(_statuses(site, new)),
    )
    told = {str(phase): left[phase] for phase in SHUTDOWN_PHASES} | {
        str(phase): came[phase] for phase in STARTUP_PHASES
    }
    return {**told, BETWEEN: pause_s - sum(told.values()) + told[ReplanPhase.NOTICE], PAUSE: pause_s}


def _statuses(site: ServiceHarness, generation: int) -> list[RankStatus]:
    paths = (path for folder in site.run_dirs("job", generation) for path in folder.glob("status-*.json"))
    found = (read_rank_status(path) for path in paths)
    return [status for status in found if status is not None]


def _checkpoint_stall_s(folder: Path) -> list[float]:
    """Return a value of rank 0 from its logs."""
    logs = (path.read_text() for path in (folder / "run/agent/jobs/job").glob("gen-*/rank-0.log"))
    return [float(found) for log in logs for found in re.findall(r"blocked training for ([0-9.]+) s", log)]


def _first_step(folder: Path, *, after: int) -> tuple[int, int]:
    """Wait for the first step of a generation after `after` and return both, immediately."""
    generation = 0

    def begun() -> bool:
        nonlocal generation
        found = [int(path.stem.partition("-g")[2]) for path in (folder / "ledger").glob("losses-g*.jsonl")]
        generation = max(found, default=0)
        return generation > after and _last_step(folder, generation) > 0

    _wait(begun)
    return generation, _last_step(folder, generation)


def _has_reached(folder: Path, generation: int, step: int) -> bool:
    return _last_step(folder, generation) >= step


def _has_reported(store: SqlStore, replans: int) -> bool:
    return len(replan_bytes.loads(store)) >= replans


def _last_step(folder: Path, generation: int) -> int:
    lines = (folder / f"ledger/losses-g{generation}.jsonl").read_text().splitlines()
    return int(json.loads(lines[-1])["step"]) if lines else 0


def _time(path: Path) -> float:
    return path.stat().st_mtime


def _is_running(store: SqlStore) -> bool:
    return store.load().snapshot.jobs["job"].state is JobState.RUNNING


def _wait(reached: Callable[[], bool]) -> None:
    limit_s = time.monotonic() + PATIENCE_S
    while not reached():
        if time.monotonic() > limit_s:
            raise TimeoutError(f"not reached within {PATIENCE_S:g} s")
        time.sleep(LOOK_S)
