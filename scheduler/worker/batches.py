"""Batches: the tokens that one rank works on in each step, as its layout and the position say."""

from __future__ import annotations

import torch
from torch import Tensor

from scheduler.domain.parallel_plan import LayerStrategy
from scheduler.worker.context_attention import token_positions
from scheduler.worker.layout import Layout, place
from scheduler.worker.model import GptSize
from scheduler.worker.text import TextData


class Batches:
    """The first layer of a plan takes the inputs, the last one the targets; their ranks may share them out unlike."""

    def __init__(self, layout: Layout, *, size: GptSize, rank: int, seed: int, device: str) -> None:
        self._layout = layout
        self._rank = layout.number_in_group(rank)
        self._has_first = 0 in layout.stages_of(rank)
        self._has_last = len(layout.stages) - 1 in layout.stages_of(rank)
        self._size = size
        self._device = device
        self._data = TextData(sequence=size.sequence, seed=seed)

    @property
    def windows(self) -> int:
        return self._data.windows

    @property
    def counts_loss(self) -> bool:
        """Whether this rank's share of the loss is counted: of tensor-parallel copies, one is."""
        return self._has_last and place(self._layout.last, self._rank).tp == 0

    def at(self, position: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of all micro-batches of the step that begins with sample number `position`, each of shape
        (micro-batches x samples of this rank, its tokens): none where the first or the last layer is elsewhere."""
        nothing = torch.empty(0, self._size.sequence, dtype=torch.int64, device=self._device)
        inputs = self._part(self._layout.first, position, which=0) if self._has_first else nothing
        return inputs, self._part(self._layout.last, position, which=1) if self._has_last else nothing

    def counted(self, position: int) -> list[int]:
        """The sample numbers that this rank answers for in a step, so that all ranks together name each once."""
        if not self._has_first:
            return []
        here = place(self._layout.first, self._rank)
        if here.tp or here.ring or here.ulysses:
            return []
        return self._samples(self._layout.first, position)

    def _samples(self, strategy: LayerStrategy, position: int) -> list[int]:
        share = self._layout.samples(strategy, self._rank)
        begins = range(position, position + self._layout.global_batch, self._layout.micro_batch_size)
        return [begin + number for begin in begins for number in share]

    def _part(self, strategy: LayerStrategy, position: int, *, which: int) -> Tensor:
        rows: Tensor = self._data.batch(self._samples(strategy, position))[which]
        index = place(strategy, self._rank).context(strategy)
        places = token_positions(tokens=self._size.sequence, ulysses=strategy.ulysses, ring=strategy.ring, index=index)
        return rows[:, places].to(self._device)
