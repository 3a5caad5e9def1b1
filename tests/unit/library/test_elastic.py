"""`ebbtide.elastic`: positions, restored state and notices, in this process."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
)

import ebbtide
from ebbtide import notice as notices
from ebbtide.elastic_run import ElasticRun
from ebbtide.global_batches import BatchSource
from ebbtide.random_state import seeded_random
from ebbtide.reproducible_draws import PositionedSampler

COUNT = 23
GLOBAL_BATCH = 8


class Numbers(TensorDataset):
    def __init__(self) -> None:
        super().__init__(torch.arange(COUNT))


def _distributed(dataset: Numbers, *, shuffle: bool) -> DataLoader[Any]:
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=2, rank=0, shuffle=shuffle)
    return DataLoader(dataset, batch_size=4, sampler=sampler)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "sequential": lambda: DataLoader(Numbers(), batch_size=4),
    "shuffled": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True),
    "distributed": lambda: _distributed(Numbers(), shuffle=False),
    "distributed-shuffled": lambda: _distributed(Numbers(), shuffle=True),
    "subset": lambda: DataLoader(Numbers(), batch_size=4, sampler=SubsetRandomSampler(range(COUNT))),
    "drop-last": lambda: DataLoader(Numbers(), batch_size=4, drop_last=True),
}


def _draw(
    loader: DataLoader[Any], *, world_size: int, epoch: int = 0, start: int = 0, steps: int | None = None
) -> tuple[list[list[int]], int]:
    """Return the sorted samples of each batch on all ranks together, and the position after them."""
    sources = [
        BatchSource(loader, global_batch=GLOBAL_BATCH, rank=rank, world_size=world_size, seed=7)
        for rank in range(world_size)
    ]
    rounds = list(islice(zip(*(source.iterate(epoch, start) for source in sources), strict=True), steps))
    assert all(len({len(batch) for (batch,), _ in each}) == 1 for each in rounds), "equal shares"
    batches = [sorted(int(number) for (batch,), _ in each for number in batch) for each in rounds]
    return batches, rounds[-1][0][1] if rounds else start


@pytest.mark.parametrize("name", list(LOADERS))
def test_batches_within_an_epoch_are_the_same_across_resizes(name: str) -> None:
    loader = LOADERS[name]()
    whole, _ = _draw(loader, world_size=1)
    batches: list[list[int]] = []
    position = 0
    for world_size, steps in ((2, 1), (4, 1), (1, None)):
        drawn, position = _draw(loader, world_size=world_size, start=position, steps=steps)
        batches += drawn
    assert batches == whole
    assert {len(batch) for batch in batches} == {GLOBAL_BATCH}
    counts = Counter(number for batch in batches for number in batch)
    assert len(counts) == (COUNT - COUNT % GLOBAL_BATCH if loader.drop_last else COUNT)
    assert counts.total() == len(counts) + (0 if loader.drop_last else -COUNT % GLOBAL_BATCH)


def test_last_batch_is_completed_so_that_every_sample_weighs_the_same_on_any_number_of_ranks() -> None:
    loader = DataLoader(TensorDataset(torch.arange(27)), batch_size=8)
    last = [_draw(loader, world_size=world_size)[0][-1] for world_size in (1, 2, 4, 8)]
    assert last == [[0, 1, 2, 3, 4, 24, 25, 26]] * 4


def test_shuffled_order_differs_by_epoch_and_is_that_of_the_distributed_sampler() -> None:
    loader = LOADERS["distributed-shuffled"]()
    assert isinstance(loader.sampler, DistributedSampler)
    orders = []
    for epoch in (0, 1):
        loader.sampler.set_epoch(epoch)
        assert set(list(loader.sampler)[:4]) < set(_draw(loader, world_size=2, epoch=epoch)[0][0])
        orders.append(_draw(loader, world_size=2, epoch=epoch)[0])
    assert orders[0] != orders[1]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class RankSampler(RandomSampler):
    num_replicas = 2


@pytest.mark.parametrize(
    ("loader", "problem"),
    [
        (lambda: DataLoader(Stream(), batch_size=2), "IterableDataset"),
        (lambda: DataLoader(Numbers(), batch_size=None), "batch_size=None"),
        (lambda: DataLoader(Numbers(), batch_sampler=[[0, 1]]), "batch sampler list"),
        (lambda: DataLoader(Numbers(), batch_size=2, sampler=RankSampler(Numbers())), "RankSampler"),
    ],
)
def test_loader_without_global_positions_is_refused(loader: Callable[[], DataLoader[Any]], problem: str) -> None:
    model, optimizer = _model()
    with pytest.raises(ValueError, match=problem), ebbtide.elastic(model, optimizer, None, loader()):
        pass


def test_drawn_data_depends_on_the_global_position_alone() -> None:
    def draw(world_size: int, base: int, calls: int) -> tuple[set[int], int]:
        seen = set()
        for rank in range(world_size):
            sampler = PositionedSampler(lambda: int(torch.randint(2**40, ())), seed=3, rank=rank, world_size=world_size)
            sampler.resume(base)
            seen.add(sampler.draw(is_training=True))  # fetched before the first step, as nanoGPT does
            sampler.begin_steps()
            seen |= {sampler.draw(is_training=True) for _ in range(calls)}
        return seen, sampler.position

    whole, end = draw(1, 0, 12)
    assert end == 12
    first, position = draw(2, 0, 2)
    second, position = draw(4, position, 2)
    assert position == 12
    assert whole <= first | second


def test_evaluation_does_not_move_the_position_and_is_equal_on_all_ranks() -> None:
    samplers = [PositionedSampler(lambda: float(torch.rand(())), seed=3, rank=rank, world_size=2) for rank in range(2)]
    drawn = [[each.draw(is_training=False), each.draw(is_training=False)] for each in samplers]
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[0][1]
    assert [each.position for each in samplers] == [0, 0]


def test_seeded_random_leaves_the_random_numbers_of_the_training_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3).tolist()
    torch.manual_seed(5)
    with seeded_random(1):
        torch.rand(100)
    assert torch.rand(3).tolist() == expected


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _train(folder: Path, *, stop_at: int = 0, notice: Path | None = None, epochs: int = 2) -> list[float]:
    """Train as a script does, and return the losses. Before step `stop_at` the rank gets a notice to leave."""
    model, optimizer = _model()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    average = torch.optim.swa_utils.AveragedModel(model)
    loader = DataLoader(Numbers(), batch_size=4, shuffle=True)
    losses = []
    with ebbtide.elastic(model, optimizer, scheduler, loader, folder=folder, average=average) as run:
        for _ in run.epochs(epochs):
            for (numbers,) in run:
                losses.append(_train_step(model, optimizer, numbers))
                scheduler.step()
                average.update_parameters(model)
                run.report(loss=torch.tensor(losses[-1]))
                if notice is not None and run.step + 1 == stop_at:
                    notice.write_text(json.dumps({"action": "leave"}))
    return [*losses, float(average.n_averaged), float(scheduler.get_last_lr()[0])]


def _train_step(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: Tensor) -> float:
    loss = model(numbers[:, None].float() / COUNT).sub(1.0).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@pytest.mark.parametrize("stop_at", [1, 4, 6, 12])
def test_interrupted_training_continues_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int) -> None:
    monkeypatch.setattr(notices, "FILE_PERIOD_S", 0.0)
    expected = _train(tmp_path / "whole")
    assert len(expected) == 2 * 6 + 2
    run_dirs = [tmp_path / "run-1", tmp_path / "run-2"]
    for run_dir in run_dirs:
        run_dir.mkdir()
    monkeypatch.setenv("EBBTIDE_CHECKPOINT_DIR", str(tmp_path / "checkpoints"))
    monkeypatch.setenv("EBBTIDE_RUN_DIR", str(run_dirs[0]))
    with pytest.raises(SystemExit) as exit_:
        _train(tmp_path / "checkpoints", stop_at=stop_at, notice=run_dirs[0] / "notice.json")
    assert exit_.value.code == 0
    status = json.loads((run_dirs[0] / "status-0.json").read_text())
    assert (status["phase"], status["step"], status["checkpoint_step"]) == ("left", stop_at, stop_at)
    monkeypatch.setenv("EBBTIDE_RUN_DIR", str(run_dirs[1]))
    assert _train(tmp_path / "checkpoints") == expected[stop_at:]
    status = json.loads((run_dirs[1] / "status-0.json").read_text())
    assert (status["phase"], status["step"]) == ("succeeded", 12)


def test_single_loop_over_several_epochs_and_accumulated_batches() -> None:
    model, optimizer = _model()
    loader = DataLoader(Numbers(), batch_size=4)
    with ebbtide.elastic(model, optimizer, None, loader, epochs=2, accumulate=3) as run:
        assert len(run) == 6
        batches = list(run)
    assert (len(batches), run.step, run.epoch) == (12, 4, 2)


def test_steps_of_a_loop_without_a_loader(tmp_path: Path) -> None:
    def train(total: int) -> list[int]:
        model, optimizer = _model()
        with ebbtide.elastic(model, optimizer, folder=tmp_path) as run:
            return list(run.steps(total))

    assert train(3) == [0, 1, 2]
    assert train(5) == [3, 4]


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _wrap_with_fsdp(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "fsdp2": _wrap_with_fsdp,
    "plain": lambda model: model,
}


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("first", ["ddp", "fsdp2"])
@pytest.mark.parametrize("then", list(WRAPPERS))
def test_checkpoint_of_a_wrapped_model_fits_any_other_wrapper(tmp_path: Path, first: str, then: str) -> None:
    def train(wrapper: str, total: int) -> list[float]:
        model, _ = _model()
        model.eval()  # without dropout
        wrapped = WRAPPERS[wrapper](model)
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
        with ebbtide.elastic(wrapped, optimizer, folder=tmp_path) as run:
            return [_train_step(wrapped, optimizer, torch.arange(step, step + 4)) for step in run.steps(total)]

    whole_model, whole_optimizer = _model()
    whole_model.eval()
    expected = [_train_step(whole_model, whole_optimizer, torch.arange(step, step + 4)) for step in range(6)]
    assert [*train(first, 3), *train(then, 6)] == pytest.approx(expected, rel=1e-5)


def test_error_in_the_loop_is_reported_and_nothing_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EBBTIDE_RUN_DIR", str(tmp_path))

    def train() -> None:
        model, optimizer = _model()
        with ebbtide.elastic(model, optimizer, folder=tmp_path / "checkpoints") as run:
            for _ in run.steps(2):
                raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        train()
    status = json.loads((tmp_path / "status-0.json").read_text())
    assert (status["phase"], status["reason"]) == ("failed", "RuntimeError: broken")
    assert not (tmp_path / "checkpoints").exists()


def _elastic(**keywords: Any) -> ElasticRun:
    model, optimizer = _model()
    return ebbtide.elastic(model, optimizer, **keywords)


@pytest.mark.parametrize(
    ("keywords", "field"),
    [({"ema": 3}, "`ema`"), ({"position": nn.Linear(1, 1)}, "`position`"), ({"accumulate": 0}, "`accumulate`")],
)
def test_unusable_argument_is_named(keywords: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        _elastic(**keywords)


def test_several_ranks_need_a_process_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("EBBTIDE_RUN_DIR", str(tmp_path))
    with pytest.raises(ValueError, match="`WORLD_SIZE` is 2"):
        _elastic()
    assert json.loads((tmp_path / "status-1.json").read_text())["phase"] == "failed"


@pytest.mark.parametrize("samples", [(), range(3)])
def test_loader_of_the_run_needs_a_loader(samples: Sequence[int]) -> None:
    with _elastic() as run, pytest.raises(ValueError, match="dataloader"):
        list(run) if samples else next(iter(run))
