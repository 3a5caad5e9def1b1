"""Batches: the tokens that one rank works on in each step, as its layout and the position say.

TextData: the text that the repository ships, cut into samples in an order that no layout can change.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from importlib import resources

import torch
from torch import Tensor

from scheduler.domain.parallel_plan import LayerStrategy
from scheduler.trainer.context_parallel import compute_token_positions
from scheduler.trainer.layout import Layout, locate_rank
from scheduler.trainer.model import GptSize


class BatchLoader:
    """The first layer of a plan takes the inputs, the last one the targets; their ranks may share them out unlike."""

    def __init__(self, layout: Layout, *, size: GptSize, rank: int, seed: int, device: str) -> None:
        self._layout = layout
        self._rank = layout.rank_in_group(rank)
        self._has_first = 0 in layout.stages_on_rank(rank)
        self._has_last = len(layout.stages) - 1 in layout.stages_on_rank(rank)
        self._size = size
        self._device = device
        self._data = TextDataset(sequence=size.sequence, seed=seed)

    @property
    def window_count(self) -> int:
        return self._data.window_count

    @property
    def counts_loss(self) -> bool:
        """Whether this rank's share of the loss is counted: of tensor-parallel copies, one is."""
        return self._has_last and locate_rank(self._layout.last_strategy, self._rank).tp == 0

    def load_batch(self, first_sample: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of all micro-batches of the step that begins with sample number `position`, each of shape
        (micro-batches x samples of this rank, its tokens): none where the first or the last layer is elsewhere."""
        nothing = torch.empty(0, self._size.sequence, dtype=torch.int64, device=self._device)
        inputs = self._load_rows(self._layout.first_strategy, first_sample, which=0) if self._has_first else nothing
        return inputs, self._load_rows(self._layout.last_strategy, first_sample, which=1) if self._has_last else nothing

    def owned_samples(self, first_sample: int) -> list[int]:
        """The sample numbers that this rank answers for in a step, so that all ranks together name each once."""
        if not self._has_first:
            return []
        here = locate_rank(self._layout.first_strategy, self._rank)
        if here.tp or here.ring or here.ulysses:
            return []
        return self._list_samples(self._layout.first_strategy, first_sample)

    def _list_samples(self, strategy: LayerStrategy, first_sample: int) -> list[int]:
        share = self._layout.sample_range(strategy, self._rank)
        begins = range(first_sample, first_sample + self._layout.global_batch, self._layout.micro_batch_size)
        return [begin + number for begin in begins for number in share]

    def _load_rows(self, strategy: LayerStrategy, first_sample: int, *, which: int) -> Tensor:
        rows: Tensor = self._data.load_samples(self._list_samples(strategy, first_sample))[which]
        index = locate_rank(strategy, self._rank).context_index(strategy)
        places = compute_token_positions(
            tokens=self._size.sequence, ulysses=strategy.ulysses, ring=strategy.ring, index=index
        )
        return rows[:, places].to(self._device)


class TextDataset:
    """Samples of `sequence` + 1 bytes, numbered by their place in the whole training: 0, 1, 2 ... without end.

    Sample number n is window n modulo the number of windows, in a new seeded order for each pass over the text. The
    number says everything: neither the rank that takes a sample nor the number of ranks has a part in it.
    """

    def __init__(self, *, sequence: int, seed: int, text: bytes | None = None) -> None:
        """
        Raises:
            ValueError: the text holds less than one sample.
        """
        self._bytes = torch.frombuffer(bytearray(_read_bundled_text() if text is None else text), dtype=torch.uint8)
        self._sequence = sequence
        self._seed = seed
        self.window_count = (len(self._bytes) - 1) // sequence
        if self.window_count < 1:
            raise ValueError(f"the text has {len(self._bytes)} bytes, a sample needs {sequence + 1}")
        self._order_pass = -1
        self._order: list[int] = []

    def find_window(self, sample: int) -> int:
        """Which window of the text sample number `sample` is."""
        text_pass, place = divmod(sample, self.window_count)
        if text_pass != self._order_pass:
            self._order_pass = text_pass
            self._order = list(range(self.window_count))
            random.Random(f"{self._seed}/{text_pass}").shuffle(self._order)
        return self._order[place]

    def load_samples(self, samples: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets, both of shape (samples, sequence); a target is the byte that follows its input."""
        starts = [self.find_window(sample) * self._sequence for sample in samples]
        rows = torch.stack([self._bytes[start : start + self._sequence + 1] for start in starts]).long()
        return rows[:, :-1], rows[:, 1:]


def _read_bundled_text() -> bytes:
    return resources.files("scheduler.trainer").joinpath("data/harbour_log.txt").read_bytes()
