"""Measured costs of sequences on the ranks of a training, from which its groups are planned."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from scheduler.solver.lengths.batch_plan import BatchPlan, MicroBatch, SequenceGroup
from scheduler.solver.lengths.sequence_costs import SequenceCosts
from scheduler.trainer.model import Gpt
from scheduler.trainer.sequence_groups import SequenceGroups, run_micro_batches

REPETITIONS = 3
SHORT_SHARE = 8
"""Times are measured on the longest sequences and on sequences of this fraction of their length."""


def measure_sequence_costs(
    model: Gpt, groups: SequenceGroups, *, degrees: tuple[int, ...], tokens: int, batch_tokens: int
) -> SequenceCosts:
    """Measure forward and backward passes at each degree. All ranks return the same costs. Collective.

    All groups of a degree run at the same time, as in a step. Gradients are left at None.

    Args:
        degrees: powers of two from 1, of which `groups` has process groups.
        tokens: of the longest sequence.
        batch_tokens: of the largest batch. Sequences run one after the other, so memory does not limit their sum.
    """
    world, short = dist.get_world_size(), max(1, tokens // SHORT_SHARE)
    times = {
        (degree, length): _time_sequence(model, groups, degree, length)
        for degree in degrees
        for length in (short, tokens)
    }
    # One sequence of each length gives the two terms of the time on one rank.
    per_token = {length: times[1, length] / length for length in (short, tokens)}
    quadratic_s = max(0.0, (per_token[tokens] - per_token[short]) / max(1, tokens - short))
    linear_s = per_token[tokens] - quadratic_s * tokens
    exchange_s, starts_s = [(1, 0.0)], [0.0]
    for degree in degrees[1:]:
        overhead_s = {length: times[degree, length] - times[1, length] / degree for length in (short, tokens)}
        starts_s.append(max(0.0, overhead_s[short]))
        left_s = max(0.0, overhead_s[tokens] - starts_s[-1]) * degree / tokens
        exchange_s.append((degree, max(exchange_s[-1][1], left_s)))
    start_s = max(starts_s)
    return SequenceCosts(world, quadratic_s, linear_s, tuple(exchange_s), 0.0, batch_tokens, start_s)


def _time_sequence(model: Gpt, groups: SequenceGroups, degree: int, tokens: int) -> float:
    """Return the seconds that the slowest rank needs for one sequence in every group of `degree`; the fastest run."""
    count = dist.get_world_size() // degree
    members = tuple(SequenceGroup(degree, (number,), 0.0) for number in range(count))
    rest = dist.get_world_size() - degree * count
    micro_batch = MicroBatch((*members, *(SequenceGroup(1, (), 0.0) for _ in range(rest))), 0.0)
    plan, sequences = BatchPlan((micro_batch,), 0.0, 0.0), [torch.zeros(tokens + 1, dtype=torch.int64)] * count
    taken_s = []
    for _ in range(1 + REPETITIONS):
        dist.barrier()
        begin_s = time.perf_counter()
        run_micro_batches(model, groups, plan, sequences).item()  # waits for a GPU
        taken_s.append(time.perf_counter() - begin_s)
        model.zero_grad(set_to_none=True)
    fastest = torch.tensor(min(taken_s[1:]), dtype=torch.float64, device=next(model.parameters()).device)
    dist.all_reduce(fastest, op=dist.ReduceOp.MAX)
    return fastest.item()
