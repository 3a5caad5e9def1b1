"""The training data: the bundled text as numbered samples, and the batches that each rank loads."""

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
    """Loader of one rank's batches, as its layout and the position require.

    The first layer of a plan takes the inputs and the last one the targets; their strategies may distribute samples
    and tokens differently.
    """

    def __init__(self, layout: Layout, *, size: GptSize, rank: int, seed: int, device: str) -> None:
        self._layout = layout
        self._rank = layout.rank_in_group(rank)
        self._has_first_layer = 0 in layout.stages_on_rank(rank)
        self._has_last_layer = len(layout.stages) - 1 in layout.stages_on_rank(rank)
        self._size = size
        self._device = device
        self._data = TextDataset(sequence=size.sequence, seed=seed)

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


class TextDataset:
    """Samples of `sequence` + 1 bytes, numbered by their position in the whole training, without end.

    Sample n is window n modulo the number of windows, in a new seeded order for each pass over the text. The order
    depends on nothing but the number: neither the number of ranks nor the rank that loads the sample changes it.
    """

    def __init__(self, *, sequence: int, seed: int, text: bytes | None = None) -> None:
        """Split `text`, by default the bundled text, into windows.

        Raises:
            ValueError: the text is shorter than one sample.
        """
        self._bytes = torch.frombuffer(bytearray(_read_bundled_text() if text is None else text), dtype=torch.uint8)
        self._sequence = sequence
        self._seed = seed
        self.window_count = (len(self._bytes) - 1) // sequence
        if self.window_count < 1:
            raise ValueError(f"The text has {len(self._bytes)} bytes, but a sample needs {sequence + 1}.")
        self._order_pass = -1
        self._order: list[int] = []

    def find_window(self, sample: int) -> int:
        """Return the window of the text that sample `sample` is."""
        text_pass, place = divmod(sample, self.window_count)
        if text_pass != self._order_pass:
            self._order_pass = text_pass
            self._order = list(range(self.window_count))
            random.Random(f"{self._seed}/{text_pass}").shuffle(self._order)
        return self._order[place]

    def load_samples(self, samples: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of shape (samples, sequence). Each target is the byte after its input byte."""
        starts = [self.find_window(sample) * self._sequence for sample in samples]
        rows = torch.stack([self._bytes[start : start + self._sequence + 1] for start in starts]).long()
        return rows[:, :-1], rows[:, 1:]


def _read_bundled_text() -> bytes:
    return resources.files("scheduler.trainer").joinpath("data/harbour_log.txt").read_bytes()
