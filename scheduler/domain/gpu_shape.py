"""GpuShape: everything about an allocation that a parallel plan depends on, and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache


@dataclass(frozen=True, slots=True, order=True)
class GpuGroup:
    """`nodes` hosts that each give `gpus_per_node` GPUs of one model."""

    gpu: str
    nodes: int
    gpus_per_node: int

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.gpus_per_node < 1:
            raise ValueError(
                f"a GPU group needs nodes >= 1 and gpus_per_node >= 1, got {self.nodes} x {self.gpus_per_node}"
            )

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    def __str__(self) -> str:
        return f"{self.nodes}x{self.gpus_per_node} {self.gpu}"


@dataclass(frozen=True, slots=True, order=True)
class GpuShape:
    """Groups of equal nodes, largest share per node first. No identities: two jobs on different nodes of the
    same kind have equal shapes, and so share one solved plan."""

    groups: tuple[GpuGroup, ...]
    _hash: int = field(init=False, compare=False, repr=False, default=0, metadata={"derived": True})

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self.groups))

    def __hash__(self) -> int:
        """Kept, because curves are looked up by shape many times a tick."""
        return self._hash

    def __reduce__(self) -> tuple[type[GpuShape], tuple[tuple[GpuGroup, ...]]]:
        """Another process hashes strings otherwise."""
        return GpuShape, (self.groups,)

    @classmethod
    def of_counts(cls, counts: Iterable[tuple[str, int]]) -> GpuShape:
        """The shape of an allocation given as one (GPU model, GPUs) pair a node."""
        return _shape(tuple(sorted(counts)))

    @classmethod
    def packed(cls, gpu: str, gpus: int, gpus_per_node: int) -> GpuShape:
        """The canonical shape: as few nodes as possible, all full but the last."""
        full, rest = divmod(gpus, gpus_per_node)
        return cls.of_counts([(gpu, gpus_per_node)] * full + ([(gpu, rest)] if rest else []))

    @property
    def gpus(self) -> int:
        return sum(group.gpus for group in self.groups)

    @property
    def nodes(self) -> int:
        return sum(group.nodes for group in self.groups)

    def __str__(self) -> str:
        return " + ".join(str(group) for group in self.groups)


@lru_cache(maxsize=65536)
def _shape(counts: tuple[tuple[str, int], ...]) -> GpuShape:
    ordered = sorted(Counter(counts).items(), key=lambda item: (item[0][0], -item[0][1]))
    return GpuShape(tuple(GpuGroup(gpu, nodes, per_node) for (gpu, per_node), nodes in ordered))


def canonical_counts(least: int, most: int, gpus_per_node: int) -> tuple[int, ...]:
    """The GPU counts of a range that curves are solved for ahead of need: its ends, single GPUs up to a node,
    whole nodes beyond."""
    inside = range(least, min(most, gpus_per_node) + 1)
    whole = range(gpus_per_node * (least // gpus_per_node), most + 1, gpus_per_node)
    return tuple(sorted({least, most, *inside, *(count for count in whole if count >= least and count > 0)}))
