"""The training data: numbered samples of the bundled text or of your data, and the batches that each rank loads."""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import cached_property
from importlib import resources
from typing import Protocol

import torch
from torch import Tensor

from scheduler.domain.parallel_plan import LayerStrategy
from scheduler.trainer.context_parallel import compute_token_positions
from scheduler.trainer.layout import Layout, locate_rank
from scheduler.trainer.model import GptSize


class BatchLoader:
    """Loader of one rank's batches, as its layout and the position require.

    The first layer of a plan takes the inputs and the last one the targets; their strategies may distribute samples
    and tokens differently.
    """

    def __init__(self, layout: Layout, *, size: GptSize, rank: int, data: NumberedSamples, device: str) -> None:
        self._layout = layout
        self._rank = layout.rank_in_group(rank)
        self._has_first_layer = 0 in layout.stages_on_rank(rank)
        self._has_last_layer = len(layout.stages) - 1 in layout.stages_on_rank(rank)
        self._size = size
        self._device = device
        self._data = data

    @property
    def window_count(self) -> int:
        return self._data.window_count

    def find_window(self, sample: int) -> int:
        """Return the window of the text that sample `sample` is."""
        return self._data.find_window(sample)

    @property
    def counts_loss(self) -> bool:
        """Whether this rank's share of the loss is summed. Of tensor-parallel copies, one is."""
        return self._has_last_layer and locate_rank(self._layout.last_strategy, self._rank).tp == 0

    def load_batch(self, first_sample: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of all micro-batches of the step that begins with sample `first_sample`.

        Both have the shape (micro-batches x samples of this rank, tokens of this rank). Inputs are empty if the
        first layer is on another rank, and targets if the last layer is.
        """
        inputs = targets = torch.empty(0, self._size.sequence, dtype=torch.int64, device=self._device)
        if self._has_first_layer:
            inputs = self._load_rows(self._layout.first_strategy, first_sample, targets=False)
        if self._has_last_layer:
            targets = self._load_rows(self._layout.last_strategy, first_sample, targets=True)
        return inputs, targets

    def owned_samples(self, first_sample: int) -> list[int]:
        """Return the sample numbers that this rank records in a step. Each sample is recorded by one rank."""
        if not self._has_first_layer:
            return []
        coordinates = locate_rank(self._layout.first_strategy, self._rank)
        if coordinates.tp or coordinates.ring or coordinates.ulysses:
            return []
        return self._list_samples(self._layout.first_strategy, first_sample)

    def _list_samples(self, strategy: LayerStrategy, first_sample: int) -> list[int]:
        share = self._layout.sample_range(strategy, self._rank)
        micro_batches = range(first_sample, first_sample + self._layout.global_batch, self._layout.micro_batch_size)
        return [first + number for first in micro_batches for number in share]

    def _load_rows(self, strategy: LayerStrategy, first_sample: int, *, targets: bool) -> Tensor:
        rows: Tensor = self._data.load_samples(self._list_samples(strategy, first_sample))[int(targets)]
        index = locate_rank(strategy, self._rank).context_index(strategy)
        positions = compute_token_positions(
            tokens=self._size.sequence, ulysses=strategy.ulysses, ring=strategy.ring, index=index
        )
        return rows[:, positions].to(self._device)


class Windows(Protocol):
    """Windows of a training's tokens, such as a map-style dataset of torch."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Tensor:
        """Return `sequence` + 1 token ids, 1-D: inputs, and the target of the last one."""


class NumberedSamples:
    """The samples of a training, numbered by their position in the whole training, without end.

    Sample n is window n modulo the number of windows, in a new seeded order for each pass over the data. The order
    depends on nothing but the number: neither the number of ranks nor the rank that loads the sample changes it.
    """

    def __init__(self, windows: Windows, *, seed: int) -> None:
        self._windows = windows
        self._seed = seed
        self._order_pass = -1
        self._order: list[int] = []

    @cached_property
    def window_count(self) -> int:
        return len(self._windows)

    def find_window(self, sample: int) -> int:
        """Return the window that sample `sample` is."""
        data_pass, place = divmod(sample, self.window_count)
        if data_pass != self._order_pass:
            self._order_pass = data_pass
            self._order = list(range(self.window_count))
            random.Random(f"{self._seed}/{data_pass}").shuffle(self._order)
        return self._order[place]

    def load_samples(self, samples: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of shape (samples, sequence). Each target is the token after its input."""
        rows = torch.stack([self._windows[self.find_window(sample)] for sample in samples]).long()
        return rows[:, :-1], rows[:, 1:]


class TextWindows:
    """The bytes of a text in consecutive windows."""

    def __init__(self, text: bytes, *, sequence: int) -> None:
        """Split the text.

        Raises:
            ValueError: the text is shorter than one sample.
        """
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._sequence = sequence
        if len(self._bytes) <= sequence:
            raise ValueError(f"The text has {len(self._bytes)} bytes, but a sample needs {sequence + 1}.")

    def __len__(self) -> int:
        return (len(self._bytes) - 1) // self._sequence

    def __getitem__(self, index: int) -> Tensor:
        start = index * self._sequence
        return self._bytes[start : start + self._sequence + 1]


class TextDataset(NumberedSamples):
    """The samples of a text, by default the bundled one, of `sequence` + 1 bytes each."""

    def __init__(self, *, sequence: int, seed: int, text: bytes | None = None) -> None:
        """Split the text into windows.

        Raises:
            ValueError: the text is shorter than one sample.
        """
        super().__init__(TextWindows(_read_bundled_text() if text is None else text, sequence=sequence), seed=seed)


def _read_bundled_text() -> bytes:
    return resources.files("scheduler.trainer").joinpath("data/harbour_log.txt").read_bytes()
