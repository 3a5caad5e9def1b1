"""The strategy space, written anew from its definition in `LayerStrategy`, and every plan of a request.

Nothing is left out because it cannot win. The costs of single layers are the evaluator's; all else is added up here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, product
from math import gcd

import numpy as np

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Recompute, Schedule, ScheduleName, Stage
from scheduler.solver.costs.communication_time import compute_border_s, compute_reshard_s
from scheduler.solver.costs.layer_chain import Layer, build_layer_chain, build_layer_table
from scheduler.solver.costs.layer_memory import compute_activation_bytes, compute_buffer_bytes, compute_state_bytes
from scheduler.solver.costs.layer_time import compute_layer_times
from scheduler.solver.costs.pipeline_costs import StageGroup, compute_hand_over_table_s
from scheduler.solver.costs.strategy_space import StrategyCandidates
from scheduler.solver.instance import Floats, Instance, StageCosts
from scheduler.solver.profiles.hardware_profile import Dimension
from scheduler.solver.profiles.model_profile import ModelProfile
from scheduler.solver.request import DeviceGroup, SolveRequest
from tests.builders_enumeration import PricedPartition


@dataclass(frozen=True)
class Pipe:
    """One pipeline: stage widths by group, schedule and micro-batches, with the strategies that each group allows."""

    request: SolveRequest
    widths: tuple[int, ...]
    schedule: Schedule
    micro_batches: int
    borders: tuple[int, ...]

    @property
    def samples(self) -> int:
        return self.request.global_batch // self.micro_batches

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(group.gpus // width for group, width in zip(self.request.groups, self.widths, strict=True))

    @cached_property
    def options(self) -> tuple[list[LayerStrategy], ...]:
        return tuple(
            allowed_strategies(self.request.model, group, width, self.samples)
            for group, width in zip(self.request.groups, self.widths, strict=True)
        )

    @cached_property
    def instance(self) -> Instance:
        groups, devices = self.request.groups, sum(self.counts)
        one_node = len(groups) == 1 and groups[0].gpus <= groups[0].node_gpus
        precision = groups[0].hardware.precision
        layers = build_layer_chain(self.request.model, precision, stages=devices, one_node=one_node)
        kinds = tuple(dict.fromkeys(layers))
        stages = [
            StageGroup(group.hardware, group.node_gpus, width, count)
            for group, width, count in zip(groups, self.widths, self.counts, strict=True)
        ]
        return Instance(
            types=np.array([kinds.index(layer) for layer in layers]),
            costs=tuple(_costs(kinds, group, width, self) for group, width in enumerate(self.widths)),
            counts=self.counts,
            capacity_bytes=tuple(group.capacity_bytes for group in groups),
            in_flight=tuple(self._in_flight(devices, position) for position in range(devices)),
            hand_over_s=compute_hand_over_table_s(
                layers, tuple(stages), self.samples, interleave=self.schedule.interleave
            ),
            micro_batches=self.micro_batches,
            interleave=self.schedule.interleave,
            borders=self.borders,
        )

    def _in_flight(self, devices: int, position: int) -> float:
        """Return micro-batches in units of a device's layers: all under GPipe, one per device from here on under
        1F1B, by chunks if interleaved."""
        after, chunks = devices - position - 1, self.schedule.interleave
        most = {
            ScheduleName.GPIPE: self.micro_batches,
            ScheduleName.ONE_F_ONE_B: after + 1,
            ScheduleName.INTERLEAVED: ((chunks - 1) * devices + 2 * after + 1) / chunks,
        }
        return min(self.micro_batches, most[self.schedule.name])

    def time_s(self, found: PricedPartition) -> Floats:
        """Return [N]: times of an iteration."""
        return found.time_s + max(group.hardware.iteration_overhead_s for group in self.request.groups)

    def peak_bytes(self, found: PricedPartition) -> Floats:
        """Return [N]: memory of the fullest GPU, its reserve included."""
        reserve = np.array([group.hardware.reserve_bytes for group in self.request.groups])[list(found.order)]
        ratio = np.array([group.hardware.reserve_ratio for group in self.request.groups])[list(found.order)]
        return np.asarray((reserve + np.ceil(found.memory_bytes * (1 + ratio))).max(axis=1))

    def plan(self, found: PricedPartition, number: int) -> ParallelPlan:
        groups, choice = self.request.groups, found.choices[number]
        stages = []
        for chunk, (first, end) in enumerate(pairwise(found.borders)):
            group = found.order[chunk % len(found.order)]
            chosen = tuple(self.options[group][at] for at in choice[first:end])
            stages.append(Stage(first, end - 1, groups[group].hardware.gpu, self.widths[group], chosen))
        return ParallelPlan(self.schedule, self.micro_batches, self.samples, 0.0, 0.0, 0, tuple(stages))


def enumerate_pipes(request: SolveRequest) -> Iterator[Pipe]:
    """Yield all pipelines that use every GPU of the request, or every GPU of some of its models."""
    models = [group.hardware.gpu for group in request.groups]
    for number in range(1, 2 ** len(models)):
        chosen = [gpu for place, gpu in enumerate(models) if number >> place & 1]
        yield from _enumerate_full_pipes(request.restrict_to_gpus(chosen))


def _enumerate_full_pipes(request: SolveRequest) -> Iterator[Pipe]:
    for widths in product(*(_divisors(group.gpus) for group in request.groups)):
        for micro_batches in _divisors(request.global_batch):
            for schedule, borders in _schedules(request, widths, micro_batches):
                pipe = Pipe(request, widths, schedule, micro_batches, borders)
                if all(pipe.options):
                    yield pipe


def allowed_strategies(model: ModelProfile, group: DeviceGroup, gpus: int, samples: int) -> list[LayerStrategy]:
    """Return every strategy of a layer on a stage of `gpus` GPUs, for micro-batches of `samples`."""
    has = group.hardware.supports
    shardings = [dimension for dimension in _SHARDINGS if has(dimension)]
    recomputes = [again for again, dimension in _RECOMPUTES.items() if dimension is None or has(dimension)]
    offloads = [(False, False), *([(True, False)] if has(Dimension.OFFLOAD) else [])]
    offloads += [(True, True)] if has(Dimension.OFFLOAD) and has(Dimension.OFFLOAD_PARAMETERS) else []
    found = []
    for tp, sharded, dp, ulysses, ring, ep in _spreads(model, group, gpus, samples):
        replicas, in_node = gpus // tp, gcd(group.node_gpus, gpus) // tp
        kinds = [(0, 1)]
        if replicas > 1:
            kinds += [(zero, replicas) for dimension in shardings for zero in _SHARDINGS[dimension]]
            nested = in_node % ep == 0 or ep % in_node == 0
            if has(Dimension.HYBRID_SHARD) and 1 < in_node < replicas and nested:
                kinds.append((3, in_node))
        for (zero, shards), again, (offload, streamed) in product(kinds, recomputes, offloads):
            if offload and not zero and replicas > 1:
                continue
            if streamed and replicas > 1 and (zero, shards) != (3, replicas):
                continue
            for inputs in (False, True) if again is Recompute.FULL and has(Dimension.OFFLOAD_ACTIVATIONS) else (False,):
                found.append(
                    LayerStrategy(1, tp, sharded, dp, zero, shards, ulysses, ring, ep, again, offload, streamed, inputs)
                )
    return found


_SHARDINGS = {Dimension.ZERO: (1, 2), Dimension.FSDP: (3,)}
_RECOMPUTES = {
    Recompute.NONE: None,
    Recompute.SELECTIVE: Dimension.SELECTIVE_RECOMPUTE,
    Recompute.FULL: Dimension.RECOMPUTE,
}


def _spreads(
    model: ModelProfile, group: DeviceGroup, gpus: int, samples: int
) -> Iterator[tuple[int, bool, int, int, int, int]]:
    """Yield (tp, sequence sharding, dp, ulysses, ring, ep)."""
    has, runs = group.hardware.supports, model.layers
    experts = gcd(*(run.experts for run in runs))
    for tp, dp, ulysses, ring in product(_divisors(gpus), repeat=4):
        split = {Dimension.TENSOR: tp, Dimension.ULYSSES: ulysses, Dimension.RING: ring}
        if (
            tp * dp * ulysses * ring == gpus
            and all(degree == 1 or has(dimension) for dimension, degree in split.items())
            and gcd(group.node_gpus, gpus) % tp == 0
            and samples % dp == 0
            and all(run.heads % tp == 0 for run in runs)
            and all(_shares_alike(run.tokens_per_sample, ulysses, ring) for run in runs)
            and all((run.attention_heads or run.heads) % (tp * ulysses) == 0 for run in runs)
            and all(not run.measured_degrees or tp in run.measured_degrees for run in runs)
        ):
            spread_experts = experts and has(Dimension.EXPERT)
            expert_degrees = _divisors(gcd(experts, gpus // tp)) if spread_experts else [1]
            may_shard = tp > 1 and has(Dimension.SEQUENCE_SHARDING)
            even = all(run.tokens_per_sample % (tp * ulysses * ring) == 0 for run in runs)
            shardings = (False, True) if may_shard and even else (False,)
            for sharded, ep in product(shardings, expert_degrees):
                yield tp, sharded, dp, ulysses, ring, ep


def _shares_alike(tokens: int, ulysses: int, ring: int) -> bool:
    """Return whether a ring rank has one chunk of each half of the sequence, and each Ulysses rank an equal part of
    both."""
    chunks = 2 * ring if ring > 1 else 1
    return tokens % chunks == 0 and tokens // chunks * (2 if ring > 1 else 1) % ulysses == 0


def _schedules(
    request: SolveRequest, widths: tuple[int, ...], micro_batches: int
) -> Iterator[tuple[Schedule, tuple[int, ...]]]:
    """Yield schedules with the cuts if they are fixed: the chunks of an interleaved pipeline are even, on equal
    devices."""
    groups, layers = request.groups, request.model.layer_count
    devices = sum(group.gpus // width for group, width in zip(groups, widths, strict=True))

    def has(dimension: Dimension) -> bool:
        return all(group.hardware.supports(dimension) for group in groups)

    if devices > layers or (devices > 1 and not has(Dimension.PIPELINE)):
        return
    yield Schedule(), ()
    if has(Dimension.GPIPE):
        yield Schedule(ScheduleName.GPIPE), ()
    if has(Dimension.INTERLEAVE) and devices > 1 and len(groups) == 1 and micro_batches % devices == 0:
        for chunks in range(2, layers // devices + 2):
            for first, last in product((0, 1), repeat=2):
                length, rest = divmod(layers + first + last, chunks * devices)
                sizes = [length] * (chunks * devices)
                sizes[0] -= first
                sizes[-1] -= last
                if not rest and min(sizes) > 0:
                    yield Schedule(ScheduleName.INTERLEAVED, chunks), (0, *accumulate(sizes))


def _costs(kinds: tuple[Layer, ...], group: int, width: int, pipe: Pipe) -> StageCosts:
    own, options = pipe.request.groups[group], pipe.options[group]
    setting = own.build_stage_setting(width, pipe.request.global_batch)
    chosen = StrategyCandidates.from_strategies(options, micro_batches=pipe.micro_batches, batch=pipe.samples)
    layouts = tuple(dict.fromkeys((option.tp, option.sequence_sharding) for option in options))
    table = build_layer_table(kinds)
    return StageCosts(
        layouts=np.array([layouts.index((option.tp, option.sequence_sharding)) for option in options]),
        time_s=compute_layer_times(kinds, chosen, setting).total_s,
        state_bytes=compute_state_bytes(kinds, chosen, setting),
        kept_bytes=compute_activation_bytes(kinds, chosen, setting),
        working_bytes=compute_buffer_bytes(kinds, chosen, setting),
        reshard_s=compute_reshard_s(table, layouts, np.array([pipe.samples]), setting)[0],
        border_s=compute_border_s(table, chosen.degrees, setting),
    )


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
