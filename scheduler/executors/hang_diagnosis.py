"""Diagnosis of hung runs from the liveness of all ranks, as the agents of their nodes report it. Pure.

No agent can decide alone: ranks that wait for another one in a collective make no progress either, and the other one
may save a checkpoint on another node.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scheduler.domain.observation import RankLiveness, RankPhase, RankReport

WAITING_FRAMES = ("torch/distributed/", "ebbtide/notice.py", "ebbtide/rendezvous.py", "autograd/graph.py")
"""Files in which a rank waits for other ranks: collectives, and the backward pass, which contains them."""
_ADVANCED_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class PlacedRank:
    """A living rank, its node and its report; None before the first one."""

    rank: int
    node: str
    report: RankReport | None


@dataclass(frozen=True, slots=True)
class Hang:
    """A hung run. `suspects` are the nodes whose machine may be the cause; empty if the evidence names none."""

    reason: str
    suspects: tuple[str, ...] = ()


def diagnose_hang(ranks: Iterable[PlacedRank]) -> Hang | None:
    """Return the hang of a run, or None.

    With a session, a run is hung if a rank is stalled, no rank works on anything else, and each rank that still steps
    has gone on without the stalled one. Ranks that never reported a step are not asked then, as many scripts report on
    rank 0 alone. Without a session, a run is hung if all its ranks are idle.

    Args:
        ranks: the living ranks.
    """
    living = list(ranks)
    stalled = _select(living, RankLiveness.STALLED)
    if stalled:
        working, stepping = _select(living, RankLiveness.WORKING), _select(living, RankLiveness.STEPPING)
        has_others = any(each.report is None for each in living)
        if working or has_others or not all(_has_gone_on(each, stalled) for each in stepping):
            return None
        return _build_hang(stalled)
    idle = _select(living, RankLiveness.IDLE)
    return _build_hang(idle) if idle and len(idle) == len(living) else None


def _select(ranks: Iterable[PlacedRank], liveness: RankLiveness) -> list[PlacedRank]:
    return [each for each in ranks if each.report is not None and each.report.liveness is liveness]


def _has_gone_on(rank: PlacedRank, stalled: Sequence[PlacedRank]) -> bool:
    """Return whether a rank has written its status long after a stalled one wrote its last."""
    status = None if rank.report is None else rank.report.status
    if status is None or status.phase is not RankPhase.RUNNING:
        return False
    return any(
        each.report is not None
        and each.report.status is not None
        and status.written_at_ns - each.report.status.written_at_ns > _ADVANCED_SHARE * each.report.inactive_s * 1e9
        for each in stalled
    )


def _build_hang(inactive: Sequence[PlacedRank]) -> Hang:
    """Blame the ranks that do not wait for others, else those behind in steps; the first of them is named."""
    is_single_node = len({each.node for each in inactive}) == 1
    with_stacks = [each for each in inactive if each.report is not None and each.report.stack]
    to_blame = [each for each in with_stacks if not _is_waiting(each)]
    has_evidence = bool(to_blame) and len(with_stacks) == len(inactive)
    culprits = sorted(to_blame or inactive, key=_blame_key)
    nodes = tuple(dict.fromkeys(each.node for each in culprits))
    suspects = nodes if len(nodes) == 1 and (has_evidence or is_single_node) else ()
    return Hang(_describe(culprits[0], others=len(inactive) - 1), suspects)


def _is_waiting(rank: PlacedRank) -> bool:
    assert rank.report is not None, "only ranks with a report are inactive"
    return any(file in rank.report.stack for file in WAITING_FRAMES)


def _blame_key(rank: PlacedRank) -> tuple[int, float, int]:
    report = rank.report
    assert report is not None, "only ranks with a report are inactive"
    return 0 if report.status is None else report.status.step, -report.inactive_s, rank.rank


def _describe(culprit: PlacedRank, *, others: int) -> str:
    report = culprit.report
    assert report is not None, "only ranks with a report are inactive"
    last = f" (last step {report.status.step})" if report.liveness is RankLiveness.STALLED and report.status else ""
    place = f" at {report.stack.partition(' < ')[0]}" if report.stack else ""
    waiting = f"; {others} other rank{'s' if others > 1 else ''} of the job waited" if others else ""
    hung = f"rank {culprit.rank} on node {culprit.node} made no progress for {report.inactive_s:.0f} s{last}{place}"
    return f"{hung}{waiting}; stacks are in its log"
