"""Predictions for many measured runs at once, as functions of the GPU's constants.

The results equal those of `evaluate` for each run (a test compares them) and take about a hundredth of the time:
everything that does not depend on the constants is computed once, and the layers of many runs are costed in one call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.solver.calibration.measured_runs import MeasuredRun
from scheduler.solver.costs.collectives import StageSetting, send_s
from scheduler.solver.costs.communication_time import compute_border_s
from scheduler.solver.costs.layer_chain import Layer, build_layer_chain, build_layer_table
from scheduler.solver.costs.layer_time import compute_layer_times
from scheduler.solver.costs.pipeline_costs import StageGroup
from scheduler.solver.costs.strategy_space import ParallelDegrees, StrategyCandidates
from scheduler.solver.instance import Floats, Ints
from scheduler.solver.plan_rules import as_single_layer
from scheduler.solver.profiles.hardware_profile import HardwareProfile

_RUNS_PER_BATCH = 32
"""Runs per call. A call costs the layers of every run under the strategy of every run, and keeps the diagonal."""


@dataclass(frozen=True, slots=True)
class RunTimePredictor:
    """Predictor for runs on one GPU model whose layers all follow one strategy. `batches` hold indices of runs."""

    runs: tuple[_PreparedRun, ...]
    batches: tuple[tuple[int, ...], ...]

    @classmethod
    def from_runs(cls, runs: Sequence[MeasuredRun], hardware: HardwareProfile) -> RunTimePredictor:
        """Compute everything that does not depend on the constants of `hardware`.

        Plans are not checked: a run was possible where it was made, even if the solver would not plan it.

        Raises:
            ValueError: a run's layers follow several strategies.
        """
        parts = tuple(_PreparedRun.from_run(run, hardware) for run in runs)
        # Of a stage's setting, the costs of a layer depend only on the GPUs that share a node.
        alike: dict[tuple[int, int], list[int]] = {}
        for number, part in enumerate(parts):
            alike.setdefault((part.setting.node_gpus, part.setting.node_gpus_min), []).append(number)
        batches = (
            tuple(some[at : at + _RUNS_PER_BATCH])
            for some in alike.values()
            for at in range(0, len(some), _RUNS_PER_BATCH)
        )
        return cls(parts, tuple(batches))

    def predict_s(self, hardware: HardwareProfile) -> Floats:
        """Return [R]: iteration times under the constants of `hardware`.

        `hardware` must have the precision and worker that were given before.
        """
        times_s = np.empty(len(self.runs))
        for numbers in self.batches:
            times_s[list(numbers)] = _predict_batch_s([self.runs[number] for number in numbers], hardware)
        return times_s


@dataclass(frozen=True, slots=True, eq=False)
class _PreparedRun:
    """Loads of a run's pipeline as sums of K times by layer type.

    There are four causes: a layer, gathering at a border, a hand-over within a node, and one across nodes.

    Attributes:
        loads: [D, 4 x K], one row per distinct device or link; `times` [D] is how often each occurs.
        share: samples of a micro-batch per GPU of a stage.
    """

    setting: StageSetting
    kinds: tuple[Layer, ...]
    candidates: StrategyCandidates
    loads: Floats
    times: Ints
    share: float
    micro_batches: int
    interleave: int

    @classmethod
    def from_run(cls, run: MeasuredRun, hardware: HardwareProfile) -> _PreparedRun:
        plan, (group,) = run.plan, run.build_request(hardware).groups
        strategies = {as_single_layer(strategy) for stage in plan.stages for strategy in stage.strategies}
        if len(strategies) > 1:
            raise ValueError(f"the layers of {run.model.name} follow {len(strategies)} strategies; 1 is allowed")
        one_node, gpus = group.gpus <= group.node_gpus, plan.stages[0].gpus
        layers = build_layer_chain(run.model, hardware.precision, stages=plan.pipeline_devices, one_node=one_node)
        kinds = tuple(dict.fromkeys(layers))
        side = StageGroup(hardware, group.node_gpus, gpus, plan.pipeline_devices)
        loads = Counter(map(tuple, _build_load_matrix(plan, [kinds.index(layer) for layer in layers], side).tolist()))
        return cls(
            setting=group.build_stage_setting(gpus, plan.global_batch),
            kinds=kinds,
            candidates=StrategyCandidates.from_strategies(
                list(strategies), micro_batches=plan.micro_batches, batch=plan.micro_batch_size
            ),
            loads=np.array(list(loads)),
            times=np.array(list(loads.values())),
            share=plan.micro_batch_size / gpus,
            micro_batches=plan.micro_batches,
            interleave=plan.schedule.interleave,
        )

    def compute_iteration_s(self, by_cause_s: Floats) -> float:
        """Return the iteration time from the times [4, K], by the formula of `evaluate`."""
        loads_s = self.loads @ by_cause_s.ravel()
        waves = self.micro_batches - 1 / self.interleave
        return float(self.times @ loads_s / self.interleave + waves * loads_s.max())


def _build_load_matrix(plan: ParallelPlan, types: Sequence[int], side: StageGroup) -> Floats:
    """Return [devices + links, 4 x K] from the layer types of the chain in order, summed as `evaluate` does."""
    devices, kinds = plan.pipeline_devices, max(types) + 1
    loads = np.zeros((2 * devices, 4, kinds))
    for number, stage in enumerate(plan.stages):
        device, link = number % devices, devices + number % devices
        np.add.at(loads[device, 0], types[stage.first_layer : stage.last_layer + 1], 1)
        if number > 0:
            loads[device, 1, types[stage.first_layer]] += 1
        if number < len(plan.stages) - 1:
            loads[device, 1, types[stage.last_layer]] += 1
            crosses = side.spans_nodes if number % devices == devices - 1 else side.crosses_nodes(number % devices)
            loads[link, 3 if crosses else 2, types[stage.last_layer]] += 1
    return loads.reshape(2 * devices, 4 * kinds)


def _predict_batch_s(runs: Sequence[_PreparedRun], hardware: HardwareProfile) -> Floats:
    kinds = tuple(dict.fromkeys(kind for run in runs for kind in run.kinds))
    numbers = {kind: number for number, kind in enumerate(kinds)}
    table, candidates = build_layer_table(kinds), _concatenate_candidates([run.candidates for run in runs])
    setting = replace(runs[0].setting, hardware=hardware)
    sent_bytes = table.boundary_bytes * np.array([run.share for run in runs])
    there_and_back = 1 + table.backward
    by_cause_s = np.stack(
        [
            compute_layer_times(kinds, candidates, setting).total_s,
            compute_border_s(table, candidates.degrees, setting),
            *(
                there_and_back * send_s(sent_bytes, far, hardware, setting.node_gpus)
                for far in (np.zeros(1), np.ones(1))
            ),
        ]
    )
    times_by_run = [by_cause_s[:, [numbers[kind] for kind in run.kinds], at] for at, run in enumerate(runs)]
    times_s = [run.compute_iteration_s(causes_s) for run, causes_s in zip(runs, times_by_run, strict=True)]
    return np.array(times_s) + hardware.iteration_overhead_s


def _concatenate_candidates(candidates: Sequence[StrategyCandidates]) -> StrategyCandidates:
    """Return all candidates one after the other; each must hold a single strategy."""
    degrees = [candidate.degrees for candidate in candidates]
    joint = ParallelDegrees(
        *(np.concatenate([getattr(entry, field.name) for entry in degrees]) for field in fields(ParallelDegrees))
    )
    names = [field.name for field in fields(StrategyCandidates) if field.name not in ("degrees", "degree_index")]
    rest = {name: np.concatenate([getattr(candidate, name) for candidate in candidates]) for name in names}
    return StrategyCandidates(degrees=joint, degree_index=np.arange(len(candidates)), **rest)
