"""Settings of a training, and what they require of the session and its plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ebbtide.session import Session
from scheduler.domain.parallel_plan import ParallelPlan, plan_from_json
from scheduler.solver.lengths.histogram import read_lengths
from scheduler.trainer.layout import Layout, make_data_parallel_plan
from scheduler.trainer.model import get_model_size
from scheduler.trainer.optimizer import BatchScalingRule, LearningRateDecay
from scheduler.trainer.varied_lengths import require_data_parallel

_DEFAULT_GLOBAL_BATCH = 12


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """Settings of a training; `train.py` has one command-line option for each.

    Attributes:
        steps: 0 means the job's number of steps.
        global_batch: samples per step; 0 means the plan's.
        checkpoint_every: steps between checkpoints; 0 means the job's checkpoint interval.
        keep: number of complete checkpoints to keep; 0 means the job's.
        freeze: pairs (step, blocks): from that step on, the first `blocks` blocks are frozen.
        frozen_cache: directory for the outputs of frozen blocks, shared by all ranks; None computes them in each step.
        ledger_digests: record a digest of the whole state at each save and load. Every rank needs memory for the state.
        lengths: file of sample lengths in tokens; None gives all samples the model's length.
    """

    model: str = "tiny-gpt"
    steps: int = 0
    global_batch: int = 0
    batch_rule: BatchScalingRule = BatchScalingRule.KEEP
    checkpoint_every: int = 0
    keep: int = 0
    seed: int = 0
    dtype: str = "float32"
    learning_rate: float = 1e-3
    warmup_steps: int = 0
    decay: LearningRateDecay = LearningRateDecay.CONSTANT
    freeze: tuple[tuple[int, int], ...] = ()
    frozen_cache: Path | None = None
    step_delay_s: float = 0.0
    ledger_dir: Path | None = None
    ledger_digests: bool = False
    lengths: Path | None = None

    def frozen_blocks_at(self, step: int) -> int:
        """Return how many blocks are frozen at `step`."""
        return max((blocks for begin, blocks in self.freeze if begin <= step), default=0)


def build_settings(options: Mapping[str, Any]) -> TrainerSettings:
    """Return the settings of the parsed command-line options."""
    named = {"batch_rule": BatchScalingRule(options["batch_rule"]), "decay": LearningRateDecay(options["decay"])}
    return TrainerSettings(**{**options, **named})


def read_sample_lengths(settings: TrainerSettings, layout: Layout) -> tuple[int, ...]:
    """Return the lengths of the samples, or nothing if all have the model's length.

    Raises:
        ValueError: the file is invalid, or the settings do not allow unlike lengths.
    """
    if settings.lengths is None:
        return ()
    require_data_parallel(layout)
    if settings.freeze or settings.frozen_cache is not None:
        raise ValueError("`--lengths` cannot be combined with `--freeze` or `--frozen-cache`. Remove one of them.")
    return read_lengths(settings.lengths, context=get_model_size(settings.model).sequence)


def validate_frozen_blocks(session: Session, settings: TrainerSettings, block_count: int) -> None:
    for source, frozen in (
        ("--freeze", max((blocks for _, blocks in settings.freeze), default=0)),
        ("EBBTIDE_FROZEN_LAYERS", session.frozen_layers),
    ):
        if frozen > block_count:
            raise ValueError(
                f"`{source}` freezes {frozen} blocks, but {settings.model} has {block_count}. "
                f"Freeze {block_count} or fewer."
            )


def select_plan(session: Session, settings: TrainerSettings) -> ParallelPlan:
    """Return the session's plan with the configured global batch."""
    if session.plan is None:
        return make_data_parallel_plan(
            replicas=session.world_size, global_batch=settings.global_batch or _DEFAULT_GLOBAL_BATCH
        )
    plan, global_batch = plan_from_json(session.plan), settings.global_batch
    if global_batch == 0:
        return plan
    if global_batch % plan.micro_batches:
        raise ValueError(
            f"`--global-batch` is {global_batch}, but the plan has {plan.micro_batches} micro-batches. "
            f"Use a multiple of {plan.micro_batches}."
        )
    return replace(plan, micro_batch_size=global_batch // plan.micro_batches)


def parse_dtype(name: str) -> torch.dtype:
    dtypes = {"float32": torch.float32, "float64": torch.float64}
    if name not in dtypes:
        raise ValueError(f"`dtype` is {name!r}. Accepted values: {', '.join(dtypes)}.")
    return dtypes[name]
