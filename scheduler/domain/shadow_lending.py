"""Record of the loans that a pool in shadow mode would have made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ShadowLending:
    """Loans that a pool in shadow mode would have made. No node is ever lent because of it.

    Args:
        since_s: when the pool entered shadow mode, in seconds since 1970 (UTC).
        nodes: nodes that would be on loan now, by name.
        gpus: how many of their GPUs jobs would use; jobs are counted in full passes.
        settled_at_s: time up to which `settled_gpu_s` counts.
        settled_gpu_s: GPU-seconds that jobs would have used.
        loans: how many loans would have begun.
        recalls: how many of them inference would have ended.
    """

    since_s: float
    nodes: tuple[str, ...] = ()
    gpus: float = 0.0
    settled_at_s: float = 0.0
    settled_gpu_s: float = 0.0
    loans: int = 0
    recalls: int = 0

    def compute_gpu_s(self, now_s: float) -> float:
        """Return the GPU-seconds that jobs would have used until `now_s`."""
        return self.settled_gpu_s + self.gpus * max(0.0, now_s - self.settled_at_s)

    def change_loans(self, now_s: float, nodes: tuple[str, ...], *, gpus: float, recalls: int) -> ShadowLending:
        """Return the record with `nodes` on loan from `now_s` on, of which `recalls` nodes fewer by recall.

        An equal state is returned as the same object, so that it is not stored again.
        """
        if nodes == self.nodes and gpus == self.gpus and not recalls:
            return self
        return replace(
            self,
            nodes=nodes,
            gpus=gpus,
            settled_at_s=now_s,
            settled_gpu_s=self.compute_gpu_s(now_s),
            loans=self.loans + len(set(nodes) - set(self.nodes)),
            recalls=self.recalls + recalls,
        )


def get_shadow(shadows: Mapping[str, ShadowLending], pool: str, now_s: float) -> ShadowLending:
    """Return the record of a pool, or one that begins now."""
    return shadows.get(pool) or ShadowLending(now_s, settled_at_s=now_s)
