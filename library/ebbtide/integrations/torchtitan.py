"""torchtitan: a checkpoint manager and a data loader for the job's configuration.

def elastic_llama() -> Trainer.Config:
    return make_elastic(llama3_debugmodel(), global_batch=64)
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any

from ebbtide.integrations import require_framework

require_framework("torchtitan")

import torch
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.distributed.cudagraph import cudagraph_teardown

from ebbtide.checkpoints.errors import DamagedCheckpointError
from ebbtide.global_batches import divide_global_batch
from ebbtide.integrations.checksum_records import find_damage, find_undamaged, record_checksums
from ebbtide.integrations.framework_session import FrameworkSession

_WRITTEN_LAST = (".metadata", "model.safetensors.index.json")
"""Files of which torchtitan writes one last, by the format of the checkpoint."""


class ElasticCheckpointManager(CheckpointManager):
    """torchtitan's checkpoint manager, which also acts on notices.

    torchtitan calls it after every step. On a notice it saves a checkpoint of torchtitan, and the process ends if it
    has to. A checkpoint of torch DCP is complete once its `.metadata` exists, which is written last. Once it is
    complete, its checksums are recorded. A damaged checkpoint is renamed, and the previous one is loaded.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """As that of torchtitan, but enabled. Under Ebbtide, a relative folder is in the checkpoint directory."""

        enable: bool = True

    def __init__(self, config: Config, *, base_folder: str = "", **components: Any) -> None:
        self._run = FrameworkSession()
        self._is_requested = False
        self._unrecorded: int | None = None  # the step that is being saved
        folder = (self._run.session.checkpoint_dir or Path()) / base_folder
        super().__init__(config, base_folder=str(folder), **components)

    def _load(self, step: int = -1) -> bool:
        if step != -1 and (damaged := find_damage(self._find_folder(step))):
            raise DamagedCheckpointError(
                f"The checkpoint of step {step}, which `checkpoint.load_step` names, is damaged: {', '.join(damaged)}. "
                "Set `checkpoint.load_step` to -1 to load the newest one that is undamaged."
            )
        is_loaded: bool = super()._load(step)
        self._run.session.mark_resumed(self.states["train_state"].step)
        return is_loaded

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        notice = self._run.end_step(curr_step)
        self._is_requested = notice is not None
        if not self._should_save(curr_step, last_step):
            return False
        self.maybe_wait_for_saving()
        if notice is not None or last_step or self.async_mode == "disabled":
            self._run.begin_saving(curr_step)
        is_saved: bool = super()._save(curr_step, last_step)
        self._unrecorded = curr_step
        if notice is not None:
            self.maybe_wait_for_staging()
            self.maybe_wait_for_saving()
        if self.save_future is None:
            self._record()
        if last_step:
            self._run.finish()
        elif notice is not None and notice.requires_exit:
            # NCCL waits for captured graphs that use a communicator before it destroys the communicator.
            cudagraph_teardown()
            self._run.leave()
        return is_saved

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        return self._is_requested or bool(super()._should_save(curr_step, last_step))

    def _wait_for_saving(self) -> None:
        super()._wait_for_saving()
        self._record()

    def _find_load_step(self, folder: str = "") -> int:
        if folder:
            return int(super()._find_load_step(folder))
        found = find_undamaged(self._list_complete())
        return -1 if found is None else int(found.name.rpartition("-")[2])

    def _list_complete(self) -> list[Path]:
        """Return the complete checkpoints, as torchtitan defines them, that of the most steps first."""
        folders = [path for path in Path(self.folder).glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
        complete = [path for path in folders if any((path / name).is_file() for name in _WRITTEN_LAST)]
        return sorted(complete, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)

    def _find_folder(self, step: int) -> Path:
        return Path(self._create_checkpoint_id(step))

    def _record(self) -> None:
        """Record the checksums of the checkpoint that has just been completed, and report it."""
        step, self._unrecorded = self._unrecorded, None
        if step is not None:
            record_checksums(self._find_folder(step))
            self._run.end_saving(step)


class GlobalOrderDataLoader(BaseDataLoader):
    """A data loader whose position means the same on any number of ranks.

    torchtitan's own loaders divide a dataset among ranks and cannot continue on another number of them. This one lets
    every rank read the whole sequence of samples and keep its share, so tokenisation is done on each rank.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        inner: BaseDataLoader.Config = field(default_factory=BaseDataLoader.Config)
        """The loader that defines the sequence of samples."""

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **components: Any
    ) -> None:
        self._inner = config.inner.build(dp_world_size=1, dp_rank=0, local_batch_size=local_batch_size, **components)
        self._dp_world_size = dp_world_size
        self._dp_rank = dp_rank

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield this rank's batch of each round, in which every rank gets one."""
        batches = iter(self._inner)
        while True:
            turn = list(islice(batches, self._dp_world_size))
            if len(turn) < self._dp_world_size:
                return
            yield turn[self._dp_rank]

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._inner.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._inner.load_state_dict(state_dict)


def make_elastic(config: Any, *, global_batch: int) -> Any:
    """Return a configuration of torchtitan's Trainer that takes part in resizes. `config` is changed.

    The batch per rank and the gradient accumulation follow the number of ranks, which `WORLD_SIZE` tells.

    Args:
        config: a `Trainer.Config`.
        global_batch: samples of all ranks per step.

    Raises:
        ValueError: the ranks cannot have equal shares of the global batch.
    """
    parallelism, training = config.parallelism, config.training
    model_ranks = (
        parallelism.tensor_parallel_degree * parallelism.pipeline_parallel_degree * parallelism.context_parallel_degree
    )
    replicas = max(1, int(os.environ.get("WORLD_SIZE") or 1) // model_ranks)
    division = divide_global_batch(global_batch, world_size=replicas, micro_batch_max=training.local_batch_size)
    training.global_batch_size, training.local_batch_size = global_batch, division.micro_batch
    settings = {each.name: getattr(config.checkpoint, each.name) for each in fields(config.checkpoint)}
    config.checkpoint = ElasticCheckpointManager.Config(**settings | {"enable": True})
    config.dataloader = GlobalOrderDataLoader.Config(inner=config.dataloader)
    return config
