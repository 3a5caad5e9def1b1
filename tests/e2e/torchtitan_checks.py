"""Checks of the integration with torchtitan, in the environment of the frameworks: `torchtitan_checks.py FOLDER MODE`.

torchtitan's Trainer needs a GPU. So its configuration is parsed by torchtitan itself, and its components are built and
driven as the Trainer does it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.config import ConfigManager

EXAMPLES = Path(__file__).parents[2] / "examples" / "torchtitan"
sys.path.insert(0, str(EXAMPLES))

from ebbtide.integrations.torchtitan import ElasticCheckpointManager, GlobalOrderDataLoader  # noqa: E402

WORDS = ["--module", "elastic_llama", "--config", "elastic_llama3_debugmodel"]


class Numbers(IterableDataset[Any]):
    """The numbers from 0, with a position."""

    def __init__(self) -> None:
        self._next = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            self._next += 1
            number = torch.tensor(self._next - 1)
            yield {"input": number}, number

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]


class NumberLoader(ParallelAwareDataloader):
    """A loader of torchtitan over numbers."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        pass

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int) -> None:
        super().__init__(Numbers(), dp_rank=dp_rank, dp_world_size=dp_world_size, batch_size=local_batch_size)


def check_configuration() -> None:
    """The example is parsed by torchtitan, and its global batch stays 16."""
    for world_size, expected in ((1, (8, 2)), (2, (8, 1)), (4, (4, 1))):
        os.environ["WORLD_SIZE"] = str(world_size)
        config = ConfigManager().parse_args([*WORDS, "--checkpoint.interval", "50"])
        training = config.training
        passes = training.global_batch_size // (training.local_batch_size * world_size)
        assert (training.local_batch_size, passes) == expected, (world_size, training)
        assert training.global_batch_size == 16
        assert (config.checkpoint.enable, config.checkpoint.interval) == (True, 50)
        assert config.checkpoint._owner is ElasticCheckpointManager
        assert config.dataloader._owner is GlobalOrderDataLoader
        assert config.dataloader.inner.dataset == "c4_test"


def check_samples() -> None:
    """Three steps on each number of ranks continue the sequence of numbers."""
    state: dict[str, Any] | None = None
    first = 0
    for world_size, micro_batch in ((1, 8), (2, 4), (4, 2), (2, 4), (1, 8)):
        seen, states = list[int](), []
        for rank in range(world_size):
            loader = GlobalOrderDataLoader.Config(inner=NumberLoader.Config()).build(
                dp_world_size=world_size, dp_rank=rank, local_batch_size=micro_batch
            )
            if state is not None:
                loader.load_state_dict(state)
            batches = iter(loader)
            seen += [int(number) for _ in range(3) for number in next(batches)[1]]
            states.append(loader.state_dict())
        assert sorted(seen) == list(range(first, first + 24)), (world_size, seen)
        assert all(each == states[0] for each in states)
        state, first = states[0], first + 24


class Step:
    """The part of the Trainer's state that the checkpoint manager reads."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def check_notice(folder: Path, async_mode: str) -> None:
    """A notice saves a checkpoint and ends the process, and the next generation continues there."""
    run_dir = folder / os.environ["EBBTIDE_GENERATION"]
    trainer = Step()
    model = torch.nn.Linear(2, 2)
    manager = ElasticCheckpointManager.Config(interval=2, async_mode=async_mode).build(
        dataloader=None, model_parts=[model], optimizers=Empty(), lr_schedulers=Empty(),
        states={"train_state": trainer}, sd_adapter=None, base_folder="out",
    )  # fmt: skip
    manager.load()
    (folder / f"first-{run_dir.name}").write_text(json.dumps([trainer.step, model.weight.flatten().tolist()]))
    while trainer.step < 6:
        trainer.step += 1
        with torch.no_grad():
            model.weight.fill_(trainer.step)
        manager.save(trainer.step, last_step=trainer.step == 6)
    manager.close()


class Empty:
    """An optimizer container without a state."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not state


if __name__ == "__main__":
    if sys.argv[1] == "components":
        check_configuration()
        check_samples()
    else:
        torch.distributed.init_process_group("gloo")
        check_notice(Path(sys.argv[1]), sys.argv[2])
