"""Settings of a training, and what they require of the session and its plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from ebbtide.session import Session
from scheduler.domain.parallel_plan import ParallelPlan, plan_from_json
from scheduler.solver.lengths.histogram import read_lengths
from scheduler.trainer.layout import Layout, make_data_parallel_plan
from scheduler.trainer.model import get_model_size
from scheduler.trainer.optimizer import BatchScalingRule, LearningRateDecay, OptimizerName
from scheduler.trainer.varied_lengths import require_data_parallel

_DEFAULT_GLOBAL_BATCH = 12


class Autocast(StrEnum):
    """Precision of matrix products and attention. FP16 scales the loss."""

    NONE = "none"
    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def dtype(self) -> torch.dtype | None:
        """The half precision, or None for the precision of the weights."""
        return {Autocast.BF16: torch.bfloat16, Autocast.FP16: torch.float16}.get(self)


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
        dtype: precision of the weights.
        autocast: precision of matrix products and attention.
        clip_norm: largest norm of all gradients together; 0 does not clip.
        dropout: probability of dropping an element of the embedding's output and of each branch of a block.
        compile_backend: backend of torch.compile for the blocks; empty runs them eagerly.
        dataset: MODULE:FUNCTION that builds the training data; empty takes the bundled text.
        evaluation_dataset: the same for evaluations; empty takes the training data.
        evaluate_every: steps between evaluations; 0 means none.
        evaluation_batches: global batches of an evaluation.
        evaluation_hook: MODULE:FUNCTION that rank 0 calls with the step and the loss of each evaluation.
    """

    model: str = "tiny-gpt"
    steps: int = 0
    global_batch: int = 0
    batch_rule: BatchScalingRule = BatchScalingRule.KEEP
    checkpoint_every: int = 0
    keep: int = 0
    seed: int = 0
    dtype: str = "float32"
    autocast: Autocast = Autocast.NONE
    optimizer: OptimizerName = OptimizerName.ADAMW
    clip_norm: float = 0.0
    dropout: float = 0.0
    compile_backend: str = ""
    dataset: str = ""
    evaluation_dataset: str = ""
    evaluate_every: int = 0
    evaluation_batches: int = 1
    evaluation_hook: str = ""
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
    named = {
        "batch_rule": BatchScalingRule(options["batch_rule"]),
        "decay": LearningRateDecay(options["decay"]),
        "autocast": Autocast(options["autocast"]),
        "optimizer": OptimizerName(options["optimizer"]),
    }
    return TrainerSettings(**{**options, **named})


_IDENTITY = ("model", "dtype", "seed", "learning_rate", "warmup_steps", "decay")
_OPTIONAL_IDENTITY = ("autocast", "optimizer", "clip_norm", "dropout", "dataset")


def build_identity(settings: TrainerSettings) -> dict[str, str | int | float]:
    """Return the settings that must not change between generations, because the losses would not be comparable.

    Some are left out at their defaults, as in the checkpoints of versions that did not have them.
    """
    defaults = {field.name: field.default for field in fields(TrainerSettings)}
    values = {name: getattr(settings, name) for name in (*_IDENTITY, *_OPTIONAL_IDENTITY)}
    kept = {name: value for name, value in values.items() if name in _IDENTITY or value != defaults[name]}
    return {name: str(value) if isinstance(value, StrEnum) else value for name, value in kept.items()}


def validate_settings(settings: TrainerSettings) -> None:
    """Check values that do not depend on the plan.

    Raises:
        ValueError: a value is out of range, or two settings do not fit together.
    """
    if not 0.0 <= settings.dropout < 1.0:
        raise ValueError(f"`--dropout` is {settings.dropout}. Use a number from 0 to below 1.")
    if not 0.0 <= settings.clip_norm < float("inf"):
        raise ValueError(f"`--clip-norm` is {settings.clip_norm}. Use 0 for no clipping, or a number above 0.")
    if settings.autocast is not Autocast.NONE and settings.dtype != "float32":
        raise ValueError(
            f"`--autocast` is {settings.autocast}, but `--dtype` is {settings.dtype}. Autocast needs float32."
        )
    if not settings.evaluate_every and (settings.evaluation_dataset or settings.evaluation_hook):
        raise ValueError("Evaluation is off. Set `--evaluate-every` to the number of steps between evaluations.")
    if settings.evaluate_every and settings.lengths is not None:
        raise ValueError("`--evaluate-every` cannot be combined with `--lengths`. Remove one of them.")


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
