"""Hugging Face Trainer: one callback.

trainer = Trainer(model=model, args=training_args, train_dataset=dataset)
elastic = ElasticCallback(trainer)
trainer.train(resume_from_checkpoint=elastic.checkpoint)
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ebbtide.integrations import require_framework

require_framework("transformers")

import torch
import transformers
from torch.utils.data import IterableDataset, Sampler

from ebbtide.global_batches import GlobalSampler, divide_global_batch
from ebbtide.integrations.complete_checkpoints import (
    CheckpointRecord,
    check_record,
    choose_global_batch,
    digest_model,
    discard_record,
)
from ebbtide.integrations.framework_checkpoints import FrameworkCheckpoints
from ebbtide.integrations.framework_session import FrameworkSession
from ebbtide.notice import Notice

_PATTERN = "checkpoint-*"
_KEEP_MIN = 2


class ElasticCallback(transformers.TrainerCallback):
    """Lets a Trainer take part in resizes.

    It adds itself to the trainer. At the end of each step it acts on notices: the Trainer saves one of its own
    checkpoints, and the process ends if it has to. The global batch stays the same on any number of ranks: the batch
    per device and the gradient accumulation follow. An evaluation that is due when the process has to end is made at
    the next start.

    Args:
        global_batch: samples of all ranks per step. Default: as at the first start of the training.

    Attributes:
        checkpoint: path of the newest complete checkpoint for `trainer.train(resume_from_checkpoint=...)`, or None.

    Raises:
        ValueError: the trainer cannot be resized; the message names the argument.
        CheckpointMismatchError: the newest checkpoint is of another model or version.
        DamagedCheckpointError: all checkpoints are damaged.
    """

    def __init__(self, trainer: transformers.Trainer, *, global_batch: int = 0) -> None:
        _check_arguments(trainer)
        self._run = FrameworkSession()
        self._trainer = trainer
        self._model = digest_model(trainer.model)
        self._notice: Notice | None = None
        self._loss: float | None = None
        self._pass_loss: torch.Tensor | None = None
        self._owes_evaluation = False
        self._sampler: GlobalSampler | None = None
        self._steps_per_epoch = 1
        self._keep_output()
        self._checkpoints = FrameworkCheckpoints(
            self._folder, _PATTERN, nonfinite_folder=self._run.session.checkpoint_dir
        )
        found = self._checkpoints.find_usable()
        if found is not None:
            check_record(*found, model=self._model, framework="transformers", version=transformers.__version__)
        self.checkpoint = trainer.args.resume_from_checkpoint if found is None else str(found[0])
        trainer.args.resume_from_checkpoint = self.checkpoint
        self._record = None if found is None else found[1]
        self._divide_batch(global_batch, self._record)
        self._watch_loss()
        trainer.add_callback(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.checkpoint is not None and not state.global_step:
            raise ValueError(
                f"{self.checkpoint} is the newest checkpoint, but the training starts from step 0. "
                "Call trainer.train(resume_from_checkpoint=elastic.checkpoint)."
            )
        if state.is_world_process_zero:
            self._checkpoints.clean_up()
        if self._sampler is not None:
            self._steps_per_epoch = max(1, len(self._sampler) // self._batch.global_batch)
        self._run.session.mark_resumed(state.global_step)
        if self._record is not None and self._record.position.get("owes_evaluation"):
            metrics = self._trainer._evaluate(None, None)
            self._trainer._determine_best_metric(metrics=metrics, trial=None)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # After a resize in the middle of an epoch, Accelerate does not pass the epoch on to the sampler.
        if self._sampler is not None:
            self._sampler.set_epoch(state.global_step // self._steps_per_epoch)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        self._loss = (logs or {}).get("loss", self._loss)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._notice = self._run.end_step(state.global_step, loss=self._read_loss())
        is_last = state.global_step >= state.max_steps
        ends_epoch = state.global_step % self._steps_per_epoch == 0
        self._owes_evaluation = ends_epoch and args.eval_strategy == "epoch" and state.epoch >= (args.eval_delay or 0)
        if self._notice is not None and self._notice.requires_exit and not is_last and control.should_evaluate:
            control.should_evaluate = False  # it may take longer than the notice allows
            self._owes_evaluation = True
        if self._notice is not None or is_last:
            control.should_save = True
        self._prepare_save(state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._owes_evaluation = False
        self._prepare_save(state, control)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._run.session.heartbeat()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._checkpoints.complete(self._find_checkpoint(state.global_step), self._describe(state.global_step))
        self._run.end_saving(state.global_step)
        if self._notice is not None and self._notice.requires_exit and state.global_step < state.max_steps:
            self._run.leave()
        self._notice = None

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._run.finish()

    def _prepare_save(self, state: Any, control: Any) -> None:
        if control.should_save:
            if state.is_world_process_zero:
                discard_record(self._find_checkpoint(state.global_step))
            self._run.begin_saving(state.global_step)

    def _find_checkpoint(self, step: int) -> Path:
        return self._folder / f"checkpoint-{step}"

    @property
    def _folder(self) -> Path:
        return Path(self._trainer.args.output_dir)

    def _keep_output(self) -> None:
        """Let checkpoints outlive the generation: the folder in which a rank starts does not."""
        args, session = self._trainer.args, self._run.session
        if session.checkpoint_dir is not None:
            args.output_dir = str(session.checkpoint_dir / args.output_dir)  # an absolute path stays what it is
        limit = args.save_total_limit or session.checkpoint_keep
        args.save_total_limit = max(limit, _KEEP_MIN) if limit else None

    def _divide_batch(self, asked: int, record: CheckpointRecord | None) -> None:
        trainer, args = self._trainer, self._trainer.args
        rank_batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
        replicas = trainer.get_total_train_batch_size(args) // rank_batch  # fewer than ranks with tensor parallelism
        self._batch = choose_global_batch(
            asked,
            None if record is None else record.batch,
            rank_batch=rank_batch,
            world_size=replicas,
        )
        division = divide_global_batch(
            self._batch.global_batch, world_size=replicas, micro_batch_max=args.per_device_train_batch_size
        )
        args.per_device_train_batch_size = division.micro_batch
        args.gradient_accumulation_steps = division.accumulate
        trainer._train_batch_size = args.train_batch_size
        choose_sampler = trainer._get_train_sampler

        def choose_global_sampler(*arguments: Any) -> Sampler[int] | None:
            sampler = choose_sampler(*arguments)
            if sampler is None:
                return None
            seed = args.seed if args.data_seed is None else args.data_seed
            self._sampler = GlobalSampler(
                sampler, global_batch=self._batch.global_batch, seed=seed, drop_last=args.dataloader_drop_last
            )
            return self._sampler

        trainer._get_train_sampler = choose_global_sampler

    def _watch_loss(self) -> None:
        """Keep the loss of each forward pass: by default, the Trainer leaves non-finite ones out of its logs."""
        trainer, train = self._trainer, self._trainer.training_step

        def train_and_keep_loss(*arguments: Any, **keywords: Any) -> torch.Tensor:
            self._pass_loss = train(*arguments, **keywords)
            return self._pass_loss

        trainer.training_step = train_and_keep_loss

    def _read_loss(self) -> float | None:
        """Return the loss that the Trainer has logged last, unless that of the last forward pass is not finite."""
        loss = self._run.read_loss(self._pass_loss)
        return self._loss if loss is None or math.isfinite(loss) else loss

    def _describe(self, step: int) -> CheckpointRecord:
        version, position = transformers.__version__, {"owes_evaluation": int(self._owes_evaluation)}
        return CheckpointRecord(step, self._batch, self._model, "transformers", version, position)


def _check_arguments(trainer: transformers.Trainer) -> None:
    args = trainer.args
    refused = {
        "save_only_model": (args.save_only_model, "False, because a resize needs the state of the optimizer"),
        "auto_find_batch_size": (args.auto_find_batch_size, "False, because the global batch stays the same"),
        "ignore_data_skip": (args.ignore_data_skip, "False, because a resize would repeat samples"),
    }
    for name, (value, accepted) in refused.items():
        if value:
            raise ValueError(f"`TrainingArguments.{name}` is {value}. Set it to {accepted}.")
    if isinstance(trainer.train_dataset, IterableDataset):
        raise ValueError(
            f"`train_dataset` is a {type(trainer.train_dataset).__name__}, an IterableDataset, whose samples have no "
            "positions to continue from. Use a dataset with `__getitem__` and `__len__`."
        )
    if args.n_gpu > 1:
        raise ValueError(f"The process uses {args.n_gpu} GPUs. Start one process per GPU.")
    strategy = getattr(args, "train_sampling_strategy", "random")
    if strategy not in ("random", "sequential"):
        raise ValueError(
            f"`TrainingArguments.train_sampling_strategy` is {strategy!r}, whose order depends on the number of ranks. "
            "Use 'random' or 'sequential'."
        )
