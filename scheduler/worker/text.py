"""TextData: the text that the repository ships, cut into samples in an order that no layout can change."""

from __future__ import annotations

import random
from collections.abc import Iterable
from importlib import resources

import torch
from torch import Tensor


class TextData:
    """Samples of `sequence` + 1 bytes, numbered by their place in the whole training: 0, 1, 2 ... without end.

    Sample number n is window n modulo the number of windows, in a new seeded order for each pass over the text. The
    number says everything: neither the rank that takes a sample nor the number of ranks has a part in it.
    """

    def __init__(self, *, sequence: int, seed: int, text: bytes | None = None) -> None:
        """
        Raises:
            ValueError: the text holds less than one sample.
        """
        self._bytes = torch.frombuffer(bytearray(_shipped_text() if text is None else text), dtype=torch.uint8)
        self._sequence = sequence
        self._seed = seed
        self.windows = (len(self._bytes) - 1) // sequence
        if self.windows < 1:
            raise ValueError(f"the text has {len(self._bytes)} bytes, a sample needs {sequence + 1}")
        self._order_pass = -1
        self._order: list[int] = []

    def window(self, sample: int) -> int:
        """Which window of the text sample number `sample` is."""
        text_pass, place = divmod(sample, self.windows)
        if text_pass != self._order_pass:
            self._order_pass = text_pass
            self._order = list(range(self.windows))
            random.Random(f"{self._seed}/{text_pass}").shuffle(self._order)
        return self._order[place]

    def batch(self, samples: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets, both of shape (samples, sequence); a target is the byte that follows its input."""
        starts = [self.window(sample) * self._sequence for sample in samples]
        rows = torch.stack([self._bytes[start : start + self._sequence + 1] for start in starts]).long()
        return rows[:, :-1], rows[:, 1:]


def _shipped_text() -> bytes:
    return resources.files("scheduler.worker").joinpath("data/harbour_log.txt").read_bytes()
