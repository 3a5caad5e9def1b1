"""Regimes of the benchmark tables: recorded jobs and demand on two equal pools, one policy set at a time.

The traces are not part of the repository. The environment variable EBBTIDE_DATA names the folder with jobs/ and
demand/ (microsoft/elasticflow-traces; alibaba/ServeGen). Each report is saved as a JSON file, so that a table can be
continued. Solved points of scaling curves are saved in the same folder.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from time import process_time
from typing import Any

from scheduler.documents.document import parse_document
from scheduler.documents.simulation import ClusterDocument
from scheduler.documents.trace_files import JobRow, read_demand, read_jobs
from scheduler.domain.codec import decode, encode
from scheduler.domain.commands import CurveSolved
from scheduler.domain.scaling_curve import CurveRequest
from scheduler.domain.tick_report import WantedShape
from scheduler.scheduling.policy_sets import PolicySet
from scheduler.simulator.ground_truth import parse_ground_truth
from scheduler.simulator.simulate import SimulationOptions, build_scenario, resolve_policy_sets, run_policy
from scheduler.simulator.throughput_curves import CurveCache
from scheduler.solver.curve import compute_solver_fingerprint

DEMAND = "demand/servegen_m_small.csv.gz"
PEAK_RATIO = 0.95
QUANTILE = 0.999
ORACLE = "ebbtide-oracle"
UNPRICED = "ebbtide-unpriced"
LINEAR = "ebbtide-linear"
TRUTH = "models,error=0.15,duration=0.5"

Report = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Targets:
    """Targets of `ebbtide`; None means no target."""

    jct_gain_min: float | None = None
    waiting_s_max: float | None = None
    waiting_gain_min: float | None = None
    usage_gain_min: float | None = None
    lost_ratio_max: float = 0.004


@dataclass(frozen=True, slots=True)
class Regime:
    """`nodes` nodes of 8 GPUs in each of two pools.

    `elastic_ratio` is the share of all jobs that are elastic, sampled from the jobs with 2 or more GPUs; None makes all
    of those elastic. `truth` as in `parse_ground_truth`.
    """

    name: str
    trace: str
    nodes: int
    bars: Targets
    elastic_ratio: float | None = None
    training_gpu: str = "a100-80g"
    inference_gpu: str = "a100-80g"
    truth: str = ""


REGIMES = {
    regime.name: regime
    for regime in (
        Regime("04", "04", 80, Targets(1.74, 10.0)),
        Regime("04-crowded", "04", 70, Targets(3.20, 10.0)),
        Regime("02", "02", 24, Targets(1.35, 50.0)),
        Regime("06", "06", 28, Targets(1.97, 10.0)),
        Regime("08", "08", 14, Targets(1.29, 100.0)),
        Regime("04-saturated", "04", 44, Targets(usage_gain_min=1.25, lost_ratio_max=0.01)),
        Regime("04-rigid", "04", 80, Targets(waiting_gain_min=1.53), elastic_ratio=0.05),
        *(
            Regime(
                f"{trace}-{training}-{inference}",
                trace,
                nodes,
                Targets(),
                None,
                f"{training}{memory}",
                inference,
                "models",
            )
            for trace, nodes in (("06", 28), ("02", 24))
            for training, memory, inference in (
                ("v100", "-32g", "t4"),
                ("v100", "-32g", "v100-32g"),
                ("a100", "-80g", "l4"),
                ("h100", "-80g", "l40s"),
            )
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Play:
    """One policy set in one regime. `truth` as in `parse_truth`; `limit` 0 means all jobs."""

    regime: str
    policy: str
    seed: int = 0
    truth: str = ""
    limit: int = 0

    @property
    def file(self) -> str:
        marks = ("-true" if self.truth else "") + (f"-first{self.limit}" if self.limit else "")
        return f"{self.regime}-{self.policy}-seed{self.seed}{marks}.json"


def load_or_simulate_reports(plays: Sequence[Play], folder: Path, *, processes: int) -> Mapping[Play, Report]:
    """Return the report of every run, from `folder` if it is there; otherwise simulates and saves it."""
    data_folder()
    folder.mkdir(parents=True, exist_ok=True)
    missing = [play for play in plays if not (folder / play.file).exists()]
    with ProcessPoolExecutor(processes, max_tasks_per_child=1) as pool:
        futures = {pool.submit(simulate_one, play, folder): play for play in missing}
        for number, future in enumerate(as_completed(futures), 1):
            report, one = future.result(), futures[future]
            told = f"waiting {report['queueing_s']['mean']:,.0f} s, JCT {report['jct_s']['mean']:,.0f} s"
            solved = f", {report['points_solved']} points solved in {report['solver_s']:.0f} s" if one.truth else ""
            played_s = f"played in {report['wall_s']:.0f} s{solved}"
            print(f"{number}/{len(missing)} {one.file}: {told}, {played_s}", file=sys.stderr)
    return {play: json.loads((folder / play.file).read_text()) for play in plays}


def simulate_one(one: Play, folder: Path) -> Report:
    """Simulate and save the report in `folder`."""
    regime, data = REGIMES[one.regime], data_folder()
    rows = read_jobs(data / f"jobs/itp_cluster{regime.trace}.csv.gz")[: one.limit or None]
    if regime.elastic_ratio is not None:
        rows = with_elastic_share(rows, regime.elastic_ratio, one.seed)
    cluster, curves = regime_cluster(regime.nodes, regime.training_gpu, regime.inference_gpu), CurveFile(folder)
    policies = variant(one.policy, cluster)
    options = SimulationOptions(
        forecast="oracle" if one.policy == ORACLE else "combined", truth=parse_ground_truth(one.truth or regime.truth)
    )
    world = build_scenario(
        rows, read_demand(data / DEMAND), cluster, policies, seed=one.seed, curves=curves, options=options
    )
    report, _ = run_policy(world, policies, curves=curves)
    document = {**asdict(report), "points_solved": curves.keep(), "solver_s": curves.solver_s}
    (folder / one.file).write_text(json.dumps(document))
    return document


def variant(name: str, cluster: ClusterDocument) -> PolicySet:
    """Return a named policy set, or `ebbtide` without one of its parts."""
    (policies,) = resolve_policy_sets("ebbtide" if name in (ORACLE, UNPRICED, LINEAR) else name, cluster)
    settings = policies.settings
    if name == LINEAR:
        settings = replace(settings, linear_scaling=True)
    if name == UNPRICED:
        settings = replace(settings, reconfiguration_s=0.0, reconfiguration_s_by_model={}, resize_pause_s=0.0)
    return replace(policies, name=name, settings=settings)


def regime_cluster(nodes: int, training_gpu: str = "a100-80g", inference_gpu: str = "a100-80g") -> ClusterDocument:
    hardware = {"nodes": nodes, "gpus_per_node": 8}
    lending = {"quantile": QUANTILE}
    peak_gpus = PEAK_RATIO * nodes * 8
    pools = [
        {"name": "training", "kind": "training", **hardware, "gpu": training_gpu},
        {
            "name": "inference",
            "kind": "inference",
            **hardware,
            "gpu": inference_gpu,
            "peak_gpus": peak_gpus,
            "lending": lending,
        },
    ]
    document = {"pools": pools, "elastic": {"from_gpus": 2}, "reconfiguration_s": 30, "checkpoint_interval_s": 900}
    return parse_document(ClusterDocument, document)


def with_elastic_share(rows: Iterable[JobRow], elastic_ratio: float, seed: int) -> tuple[JobRow, ...]:
    """Return the jobs with this share of elastic jobs, sampled from the jobs with 2 or more GPUs."""
    listed = tuple(rows)
    wide = [row.job_id for row in listed if row.gpus >= 2]
    count = min(len(wide), round(elastic_ratio * len(listed)))
    elastic = set(Random(f"elastic/{seed}").sample(wide, count))
    return tuple(row if row.job_id in elastic else replace(row, min_gpus=row.gpus, max_gpus=row.gpus) for row in listed)


def data_folder() -> Path:
    """Return the folder of traces. Raises FileNotFoundError if EBBTIDE_DATA is not set."""
    folder = Path(os.environ.get("EBBTIDE_DATA", ""))
    if not os.environ.get("EBBTIDE_DATA") or not (folder / DEMAND).is_file():
        raise FileNotFoundError(2, "EBBTIDE_DATA does not name the folder of the traces", str(folder / DEMAND))
    return folder


class CurveFile(CurveCache):
    """File of solved points. They stay valid as long as the solver does not change."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._file = folder / f"points-{compute_solver_fingerprint()}.jsonl"
        self._known: dict[WantedShape, CurveSolved] = {}
        self._new: list[CurveSolved] = []
        self.solver_s = 0.0
        for line in self._file.read_text().splitlines() if self._file.exists() else ():
            point = decode(CurveSolved, json.loads(line))
            self._known[WantedShape(point.curve_key, point.shape)] = point

    def _compute_point(self, request: CurveRequest, wanted: WantedShape) -> CurveSolved:
        if wanted not in self._known:
            begin_s = process_time()
            self._known[wanted] = super()._compute_point(request, wanted)
            self.solver_s += process_time() - begin_s
            self._new.append(self._known[wanted])
        return self._known[wanted]

    def keep(self) -> int:
        """Append the new points to the file and return their number."""
        text = "".join(json.dumps(encode(point)) + "\n" for point in self._new)
        with self._file.open("ab", buffering=0) as file:  # one write: other processes append too
            file.write(text.encode())
        return len(self._new)
