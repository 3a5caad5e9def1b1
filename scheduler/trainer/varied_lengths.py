"""Batches of samples of unlike lengths, each run in the sequence-parallel groups that suit it."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

import torch
import torch.distributed as dist
from torch import Tensor

from scheduler.solver.lengths.batch_search import search_batch_plan
from scheduler.solver.lengths.sequence_costs import SequenceCosts
from scheduler.trainer.dataset import NumberedSamples
from scheduler.trainer.layout import Layout
from scheduler.trainer.model import Gpt, GptSize
from scheduler.trainer.sequence_groups import SequenceGroups, list_degrees, run_micro_batches, sum_gradients
from scheduler.trainer.sequence_timing import measure_sequence_costs


def require_data_parallel(layout: Layout) -> None:
    """Check that the ranks of a layout can be grouped anew for each batch.

    Raises:
        ValueError: the plan has more than plain data parallelism.
    """
    strategy = layout.first_strategy
    if not layout.uses_ddp or strategy.ulysses * strategy.ring > 1:
        raise ValueError(
            "`--lengths` needs a plan of plain data parallelism, because each batch forms its own sequence-parallel "
            "groups. Run the job without `--lengths`, or without a model profile."
        )


class VariedLengthBatches:
    """Samples of unlike lengths: sample n has the nth length, from the first again after the last.

    `costs` are measured at the first step of a generation.
    """

    def __init__(self, lengths: Sequence[int], layout: Layout, *, size: GptSize, data: NumberedSamples) -> None:
        """Make the process groups. Collective over all ranks."""
        self._lengths = lengths
        self._layout = layout
        self._heads = size.heads
        self._context = size.sequence
        self._data = data
        self._groups = SequenceGroups(list_degrees(layout.world_size, heads=size.heads))
        self._costs: SequenceCosts | None = None

    @property
    def digest(self) -> str:
        """Digest of the lengths, which must not change between generations."""
        return sha256(repr(tuple(self._lengths)).encode()).hexdigest()[:16]

    def run(self, model: Gpt, first_sample: int, *, loss_scale: Tensor | None = None) -> Tensor:
        """Run the batch that begins with `first_sample`, and sum the gradients. Collective over all ranks.

        Returns:
            This rank's share of the mean loss over all tokens of the batch, times the scale.
        """
        samples = range(first_sample, first_sample + self._layout.global_batch)
        lengths = [self._lengths[sample % len(self._lengths)] for sample in samples]
        plan = search_batch_plan(self._measure_costs(model), lengths)
        sequences = [self._load_sequence(sample, length) for sample, length in zip(samples, lengths, strict=True)]
        first_tokens = [sample * self._context for sample in samples]
        share = run_micro_batches(
            model, self._groups, plan, sequences, first_tokens=first_tokens, loss_scale=loss_scale
        )
        sum_gradients(model)
        return share

    def _measure_costs(self, model: Gpt) -> SequenceCosts:
        if self._costs is None:
            longest = max(self._lengths)
            self._costs = measure_sequence_costs(
                model,
                self._groups,
                degrees=list_degrees(dist.get_world_size(), heads=self._heads),
                tokens=longest,
                batch_tokens=longest * self._layout.global_batch,
            )
        return self._costs

    def _load_sequence(self, sample: int, length: int) -> Tensor:
        """Return the first `length` tokens of a sample, and the token after them."""
        inputs, targets = self._data.load_samples([sample])
        return torch.cat([inputs[0, :length], targets[0, length - 1 : length]])
