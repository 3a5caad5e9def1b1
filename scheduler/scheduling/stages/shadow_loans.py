"""Loans that a pool in shadow mode would make. They have no effect on nodes or jobs."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from scheduler.domain.fleet import Node, Pool
from scheduler.domain.shadow_lending import ShadowLending, get_shadow
from scheduler.scheduling.cycle import SchedulingCycle
from scheduler.scheduling.policies.lending import LendingTarget
from scheduler.scheduling.stages.lendable_nodes import LoanRoom, WantedGpus


def update_shadow_loans(
    cycle: SchedulingCycle, pool: Pool, target: LendingTarget, nodes: Iterable[Node]
) -> ShadowLending:
    """Return the record of a pool in shadow mode after the decisions that `target` would lead to on its lendable nodes.

    Nodes that inference needs leave in every tick. New ones are added in full passes, as long as jobs could use them,
    and nodes that jobs no longer want leave there. A node leaves at once, where a real one has its return deadline; the
    record of shortages counts it as away for the deadline and the cold start all the same.
    """
    before = get_shadow(cycle.snapshot.original.shadows, pool.name, cycle.now_s)
    lendable = {node.name: node for node in nodes}
    lent = [lendable[name] for name in before.nodes if name in lendable]
    bearable = LoanRoom(target.nodes, target.gpus)
    kept = [node for node in lent if bearable.take(node.loan_gpus)]
    recalls = len(lent) - len(kept)
    gpus = min(before.gpus, float(sum(node.loan_gpus for node in kept)))
    if cycle.full_pass:
        room = LoanRoom(target.lasting_nodes, target.lasting_gpus) if target.allows_new_loans else LoanRoom(0, 0)
        for node in kept:
            room.reserve(node.loan_gpus)
        kept, gpus = _select_wanted(cycle, kept, lendable.values(), room)
    return before.change_loans(cycle.now_s, tuple(node.name for node in kept), gpus=gpus, recalls=recalls)


def _select_wanted(
    cycle: SchedulingCycle, lent: Collection[Node], lendable: Iterable[Node], room: LoanRoom
) -> tuple[list[Node], float]:
    """Return those of `lent` that jobs want, as many more as fit in, and how many of their GPUs jobs would use."""
    wanted, lent_names = WantedGpus(cycle), {node.name for node in lent}
    selected = [node for node in lent if wanted.take(node)]
    for node in lendable:
        if node.name not in lent_names and room.has(node.loan_gpus) and wanted.take(node):
            room.reserve(node.loan_gpus)
            selected.append(node)
    unused = sum(-min(0.0, wanted.count(gpu)) for gpu in {node.gpu for node in selected})
    return selected, max(0.0, sum(node.loan_gpus for node in selected) - unused)
