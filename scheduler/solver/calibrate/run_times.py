"""RunTimes: what the cost model predicts for many measured runs at once, as the constants of the GPU change.

The same result as `evaluate` gives for each run (a test holds them together), some hundred times as fast: what does not
depend on the constants is worked out once, and the layers of all runs are costed in joint calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.solver.calibrate.measured_run import MeasuredRun
from scheduler.solver.costs.candidates import Candidates
from scheduler.solver.costs.chain import Layer, chain
from scheduler.solver.costs.collectives import send_s
from scheduler.solver.costs.hand_over import StageGroup
from scheduler.solver.costs.layer_table import layer_table
from scheduler.solver.costs.layer_time import layer_times
from scheduler.solver.costs.layouts import border_s
from scheduler.solver.costs.setting import Setting
from scheduler.solver.costs.spreads import Spreads
from scheduler.solver.instance import Floats, Ints
from scheduler.solver.plan_rules import per_layer
from scheduler.solver.profiles.hardware_profile import HardwareProfile

_TOGETHER = 32
"""Runs in a joint call. It costs the layers of every run under the strategy of every run, and keeps the diagonal."""


@dataclass(frozen=True, slots=True, eq=False)
class RunTimes:
    """Predicts `runs`, whose layers all follow one strategy each, on GPUs of one model."""

    runs: tuple[_Run, ...]
    batches: tuple[_Batch, ...]

    @classmethod
    def of(cls, runs: Sequence[MeasuredRun], hardware: HardwareProfile) -> RunTimes:
        """Works out what does not depend on the constants of `hardware`.

        Plans are not checked: a run was possible where it was made, even if the solver would not plan it so.

        Raises:
            ValueError: a run's layers follow several strategies.
        """
        parts = [_Run.of(run, hardware) for run in runs]
        alike: dict[int, list[int]] = {}
        for number, part in enumerate(parts):
            alike.setdefault(part.setting.node_gpus, []).append(number)
        pieces = [some[at : at + _TOGETHER] for some in alike.values() for at in range(0, len(some), _TOGETHER)]
        return cls(tuple(parts), tuple(_Batch.of(parts, numbers) for numbers in pieces))

    def predicted_s(self, hardware: HardwareProfile) -> Floats:
        """[R]: iteration times under the constants of `hardware`; precision and worker are those given to `of`."""
        times_s = np.empty(len(self.runs))
        for batch in self.batches:
            times_s[batch.numbers] = batch.predicted_s(hardware)
        return times_s


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """Loads of a run's pipeline as sums of K times by layer type: of a layer, of gathering at a border, of a hand-over
    in the node and of one across nodes.

    Attributes:
        loads: [D, 4 x K], one row a device or link; equal ones stand there once, `times` [D] as often as they occur.
        hand_over_bytes: [K], what each GPU sends there and back.
    """

    setting: Setting
    kinds: tuple[Layer, ...]
    chosen: Candidates
    loads: Floats
    times: Ints
    hand_over_bytes: Floats
    micro_batches: int
    interleave: int

    @classmethod
    def of(cls, run: MeasuredRun, hardware: HardwareProfile) -> _Run:
        plan, request = run.plan, run.request(hardware)
        strategies = {per_layer(one) for stage in plan.stages for one in stage.strategies}
        if len(strategies) > 1:
            raise ValueError(f"the layers of {run.model.name} follow {len(strategies)} strategies; 1 is allowed")
        (group,), gpus = request.groups, plan.stages[0].gpus
        one_node = group.gpus <= group.node_gpus
        layers = chain(run.model, hardware.precision, stages=plan.devices, one_node=one_node)
        kinds = tuple(dict.fromkeys(layers))
        side = StageGroup(hardware, group.node_gpus, gpus, plan.devices)
        loads = Counter(map(tuple, _loads(plan, [kinds.index(layer) for layer in layers], side).tolist()))
        share = plan.micro_batch_size / gpus
        return cls(
            setting=Setting.of(hardware, node_gpus=group.node_gpus, gpus=gpus, global_batch=plan.global_batch),
            kinds=kinds,
            chosen=Candidates.of(list(strategies), micro_batches=plan.micro_batches, batch=plan.micro_batch_size),
            loads=np.array(list(loads)),
            times=np.array(list(loads.values())),
            hand_over_bytes=np.array([kind.boundary_bytes * share for kind in kinds]),
            micro_batches=plan.micro_batches,
            interleave=plan.schedule.interleave,
        )


def _loads(plan: ParallelPlan, types: Sequence[int], side: StageGroup) -> Floats:
    """[devices + links, 4 x K] from the layer types of the chain in order, as `evaluate` sums them up."""
    devices, kinds = plan.devices, max(types) + 1
    loads = np.zeros((2 * devices, 4, kinds))
    for number, stage in enumerate(plan.stages):
        device, link = number % devices, devices + number % devices
        np.add.at(loads[device, 0], types[stage.first_layer : stage.last_layer + 1], 1)
        if number > 0:
            loads[device, 1, types[stage.first_layer]] += 1
        if number < len(plan.stages) - 1:
            loads[device, 1, types[stage.last_layer]] += 1
            crosses = side.leaves_node if number % devices == devices - 1 else side.crosses(number % devices)
            loads[link, 3 if crosses else 2, types[stage.last_layer]] += 1
    return loads.reshape(2 * devices, 4 * kinds)


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """Runs that are costed together, as their stages have as many GPUs a node.

    Attributes:
        numbers: [B], which runs they are.
        kinds: all their layer types; `rows` [B, K] says which of them each run's are (0 where it has fewer).
        loads: [D, 4, K] of all runs, one after the other; `owner` [D] is the run of each, `firsts` [B] its first.
    """

    numbers: Ints
    setting: Setting
    kinds: tuple[Layer, ...]
    chosen: Candidates
    rows: Ints
    loads: Floats
    times: Ints
    owner: Ints
    firsts: Ints
    sent_bytes: Floats
    directions: Floats
    micro_batches: Floats
    interleave: Floats

    @classmethod
    def of(cls, parts: Sequence[_Run], numbers: Sequence[int]) -> _Batch:
        runs = [parts[number] for number in numbers]
        kinds = tuple(dict.fromkeys(kind for run in runs for kind in run.kinds))
        widest = max(len(run.kinds) for run in runs)

        def padded(values: Sequence[float] | Floats) -> Floats:
            return np.pad(np.asarray(values, dtype=np.float64), (0, widest - len(values)))

        loads = [np.pad(row.reshape(4, -1), ((0, 0), (0, widest - row.size // 4))) for run in runs for row in run.loads]
        sizes = [len(run.loads) for run in runs]
        return cls(
            numbers=np.array(numbers),
            setting=runs[0].setting,
            kinds=kinds,
            chosen=_joined([run.chosen for run in runs]),
            rows=np.array([padded([kinds.index(kind) for kind in run.kinds]) for run in runs]).astype(np.int64),
            loads=np.array(loads),
            times=np.concatenate([run.times for run in runs]),
            owner=np.repeat(np.arange(len(runs)), sizes),
            firsts=np.cumsum([0, *sizes[:-1]]),
            sent_bytes=np.array([padded(run.hand_over_bytes) for run in runs]),
            directions=np.array([padded([1.0 + kind.backward for kind in run.kinds]) for run in runs]),
            micro_batches=np.array([float(run.micro_batches) for run in runs]),
            interleave=np.array([float(run.interleave) for run in runs]),
        )

    def predicted_s(self, hardware: HardwareProfile) -> Floats:
        setting = Setting(hardware, self.setting.node_gpus, self.setting.gpus, self.setting.global_batch)
        own = np.arange(len(self.rows))[:, None]
        layers_s = layer_times(self.kinds, self.chosen, setting).total_s[self.rows, own]
        borders_s = border_s(layer_table(self.kinds), self.chosen.spreads, setting)[self.rows, own]
        near, far = np.zeros(1), np.ones(1)
        near_s, far_s = (self.directions * send_s(self.sent_bytes, crosses, hardware) for crosses in (near, far))
        by_cause_s = np.stack([layers_s, borders_s, near_s, far_s], axis=1)
        loads_s = (self.loads * by_cause_s[self.owner]).sum(axis=(1, 2))
        sums_s = np.add.reduceat(self.times * loads_s, self.firsts)
        slowest_s = np.maximum.reduceat(loads_s, self.firsts)
        waves = self.micro_batches - 1 / self.interleave
        return np.asarray(sums_s / self.interleave + waves * slowest_s + hardware.iteration_overhead_s)


def _joined(chosen: Sequence[Candidates]) -> Candidates:
    """One after the other, one strategy each."""

    def column(name: str) -> Ints:
        return np.concatenate([getattr(one, name) for one in chosen])

    spreads = [one.spreads for one in chosen]
    joint = Spreads(*(np.concatenate([getattr(one, each.name) for one in spreads]) for each in fields(Spreads)))
    rest = {each.name: column(each.name) for each in fields(Candidates) if each.name not in ("spreads", "spread")}
    return Candidates(spreads=joint, spread=np.arange(len(chosen)), **rest)
