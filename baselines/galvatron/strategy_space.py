"""Galvatron's strategies of layers, and the pipelines and strategies that a case allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import product

from baselines.galvatron.profiles import GalvatronCase
from scheduler.solver.costs.strategy_space import list_divisors
from scheduler.solver.profiles.profile_document import ProfileError

_LARGEST_DEGREE = 8
_RESERVE_ABOVE_GB = 20
_RESERVED_SHARE = 0.2


class MemoryLimitReading(StrEnum):
    """Interpretation of `memory_gb`: as given, or less the fifth that Galvatron silently reserves above 20 GB."""

    NOMINAL = "nominal"
    KEPT_BACK = "kept-back"


def compute_memory_limit_mb(memory_gb: float, reading: MemoryLimitReading) -> int:
    """Return the memory of each GPU (MB) that plans may use."""
    whole = int(memory_gb * 1024)
    kept_back = reading is MemoryLimitReading.KEPT_BACK and whole // 1024 > _RESERVE_ABOVE_GB
    return whole - int(memory_gb * 1024 * _RESERVED_SHARE) if kept_back else whole


@dataclass(frozen=True, slots=True, order=True)
class Strategy:
    """Parallelism of one layer, or of embedding and head: degrees of tensor, Ulysses sequence and data parallelism.

    Tensor and Ulysses exclude each other. `zero` is 0, 2 or 3: the replicas split no model states, optimizer and
    gradients, or all. Embedding and head never use `recompute`. Strategies sort in Galvatron's order.
    """

    tensor: int = 1
    ulysses: int = 1
    data: int = 1
    zero: int = 0
    recompute: bool = False

    def __post_init__(self) -> None:
        allowed = (0, 2, 3) if self.replicas > 1 else (0,)
        if min(self.tensor, self.ulysses) != 1 or self.data < 1 or self.zero not in allowed:
            raise ProfileError(f"{self}; tensor or ulysses must be 1, zero one of {allowed}")

    @property
    def split(self) -> int:
        """Number of GPUs that share one sample."""
        return max(self.tensor, self.ulysses)

    @property
    def replicas(self) -> int:
        """Number of GPUs that hold the same parameters: data and Ulysses parallelism."""
        return self.data * self.ulysses

    def label(self, stages: int) -> str:
        """Return Galvatron's short form `pp-tp-dp` with its marks."""
        star, zero3 = "*" if self.split > 1 else "", "f" if self.zero == 3 else ""
        tail = ("-c" if self.recompute else "") + ("-sp" if self.ulysses > 1 else "")
        return f"{stages}-{self.split}{star}-{self.data}{zero3}{tail}"


@dataclass(frozen=True, slots=True)
class PipelineSetting:
    """`stages` pipeline stages with equally many GPUs under 1F1B, and `micro_batches` micro-batches per iteration."""

    case: GalvatronCase
    stages: int
    micro_batches: int

    def __post_init__(self) -> None:
        gpus, layers, batch = self.case.cluster.gpus, self.case.model.layers, self.case.global_batch
        if gpus % self.stages or self.stages > layers:
            raise ProfileError(
                f"stages is {self.stages}; it must divide {gpus} GPUs and be at most {layers}, the layers"
            )
        if batch % self.micro_batches:
            raise ProfileError(f"micro-batches is {self.micro_batches}; it must divide the global batch of {batch}")

    @property
    def stage_gpus(self) -> int:
        return self.case.cluster.gpus // self.stages

    @property
    def micro_batch_size(self) -> int:
        return self.case.global_batch // self.micro_batches

    def local_batch(self, strategy: Strategy) -> int:
        """Return the whole samples of a micro-batch on each replica; a remainder is dropped, as in Galvatron."""
        gpus, samples = strategy.split * strategy.data, self.micro_batch_size // strategy.data
        if gpus != self.stage_gpus or samples == 0:
            allowed = f"it must spread {self.micro_batch_size} samples over {self.stage_gpus} GPUs"
            raise ProfileError(f"strategy is {strategy.label(self.stages)}; {allowed}")
        return samples

    def in_flight(self, stage: int) -> int:
        """Return the micro-batches whose activations stage `stage` (from 0) holds at its peak under 1F1B."""
        return min(self.micro_batches, self.stages - stage)


def enumerate_settings(case: GalvatronCase, *, restricted: bool) -> Iterator[PipelineSetting]:
    """Yield every pipeline degree that divides the GPUs, with the case's micro-batches or any that divide the batch.

    Galvatron itself uses powers of two up to 8, which must be profiled; other degrees are tried if they are profiled.

    Args:
        restricted: yield only Galvatron's degrees, with at most as many stages as micro-batches.
    """
    for micro_batches in [case.micro_batches] if case.micro_batches else list_divisors(case.global_batch):
        most = min(case.model.layers, micro_batches) if restricted else case.model.layers
        for stages in list_divisors(case.cluster.gpus):
            if stages <= most and (
                _is_galvatron_degree(stages) or (not restricted and stages in case.cluster.p2p_ms_per_mb)
            ):
                yield PipelineSetting(case, stages, micro_batches)


def enumerate_strategy_sets(
    setting: PipelineSetting, *, restricted: bool
) -> Iterator[tuple[int | None, list[Strategy]]]:
    """Yield each degree of the shared gathering buffer with the strategies that it serves: tensor degrees up to that.

    None is no buffer and no tensor parallelism (Galvatron's sp_only). Its tp_only has the buffer of tp_with_sp and
    fewer strategies, so the latter represents both; `restricted` then limits Ulysses to the buffer's degree too.
    """
    model, cluster = setting.case.model, setting.case.cluster
    profiled = set(model.activation_mb) & set(cluster.all_gather) & set(cluster.all_to_all)
    allowed = set() if restricted else profiled
    splits = [split for split in list_divisors(setting.stage_gpus) if _is_galvatron_degree(split) or split in allowed]
    spread = [strategy for split in splits for strategy in _enumerate_strategies(setting, split)]
    for degree in (None, *splits[1:]):
        ulysses_max = degree if restricted and degree else setting.stage_gpus
        found = {one for one in spread if one.tensor <= (degree or 1) and one.ulysses <= ulysses_max}
        if found:
            yield degree, sorted(found)


def _enumerate_strategies(setting: PipelineSetting, split: int) -> Iterator[Strategy]:
    """Yield strategies on all GPUs of a stage whose replicas share a micro-batch evenly.

    Plain data parallelism takes the time of ZeRO-2 and never less memory. Without a data-parallel group, Galvatron
    replicates what Ulysses shares and charges no reduction: sharding would be free there, and is left out.
    """
    data = setting.stage_gpus // split
    if setting.micro_batch_size % data == 0:
        for zero, recompute in product((2, 3) if data > 1 else (0,), (False, True)):
            yield Strategy(split, 1, data, zero, recompute)
            yield Strategy(1, split, data, zero, recompute)


def split_evenly(layers: int, stages: int) -> tuple[int, ...]:
    """Return the layers of each stage in Galvatron's own cut; the last stage takes the remainder."""
    each = layers // stages
    return (each,) * (stages - 1) + (layers - each * (stages - 1),)


def _is_galvatron_degree(degree: int) -> bool:
    return degree <= _LARGEST_DEGREE and degree & (degree - 1) == 0
