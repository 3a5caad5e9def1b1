"""Sets of exact GPUs, as node name -> ascending GPU indices, and the little algebra on them.

Plain mappings, because they travel into JSON, SQL and logs unchanged. A node without GPUs has no entry.
Where the order counts they are `Seats`: one (node, GPU index) for each rank.

Room: what is free on a node that training may put something new on.

GpuShape: everything about an allocation that a parallel plan depends on, and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

Gpus = Mapping[str, tuple[int, ...]]
RankPlacement = tuple[tuple[str, int], ...]

NO_GPUS: Gpus = {}


def count(gpus: Gpus) -> int:
    return sum(map(len, gpus.values()))


def union(left: Gpus, right: Gpus) -> Gpus:
    if not left or not right:
        return left or right
    return {node: tuple(sorted({*left.get(node, ()), *right.get(node, ())})) for node in sorted({*left, *right})}


def difference(left: Gpus, right: Gpus) -> Gpus:
    if not right:
        return left
    rest = ((node, tuple(i for i in indices if i not in right.get(node, ()))) for node, indices in left.items())
    return {node: indices for node, indices in rest if indices}


def intersection(left: Gpus, right: Gpus) -> Gpus:
    both = ((node, tuple(i for i in indices if i in right.get(node, ()))) for node, indices in left.items())
    return {node: indices for node, indices in both if indices}


def without_nodes(gpus: Gpus, nodes: Iterable[str]) -> Gpus:
    gone = frozenset(nodes)
    return {node: indices for node, indices in gpus.items() if node not in gone}


def place_ranks(gpus: Gpus, *, first: Collection[str]) -> RankPlacement:
    """All GPUs, node by node: the nodes of `first` before the others, both by name."""
    nodes = sorted(gpus, key=lambda node: (node not in first, node))
    return tuple((node, index) for node in nodes for index in gpus[node])


def format_gpus(gpus: Gpus) -> str:
    """For people: `t0[0-1] t1[0,3]`."""
    return " ".join(f"{node}[{_format_indices(indices)}]" for node, indices in sorted(gpus.items())) or "none"


def format_gpu_count(gpus: int) -> str:
    """For people: `1 GPU`, `3 GPUs`."""
    return "1 GPU" if gpus == 1 else f"{gpus} GPUs"


def _format_indices(indices: tuple[int, ...]) -> str:
    if len(indices) > 1 and indices[-1] - indices[0] == len(indices) - 1:
        return f"{indices[0]}-{indices[-1]}"
    return ",".join(map(str, indices))


@dataclass(frozen=True, slots=True)
class FreeGpus:
    node: str
    gpu: str
    is_lent: bool
    indices: tuple[int, ...]

    def without(self, taken: tuple[int, ...]) -> FreeGpus:
        """The room once these GPUs are taken."""
        return FreeGpus(self.node, self.gpu, self.is_lent, tuple(index for index in self.indices if index not in taken))


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
    def from_node_counts(cls, counts: Iterable[tuple[str, int]]) -> GpuShape:
        """The shape of an allocation given as one (GPU model, GPUs) pair a node."""
        return _cached_shape(tuple(sorted(counts)))

    @classmethod
    def packed(cls, gpu: str, gpus: int, gpus_per_node: int) -> GpuShape:
        """The canonical shape: as few nodes as possible, all full but the last."""
        full, rest = divmod(gpus, gpus_per_node)
        return cls.from_node_counts([(gpu, gpus_per_node)] * full + ([(gpu, rest)] if rest else []))

    @property
    def gpus(self) -> int:
        return sum(group.gpus for group in self.groups)

    @property
    def nodes(self) -> int:
        return sum(group.nodes for group in self.groups)

    def __str__(self) -> str:
        return " + ".join(str(group) for group in self.groups)


@lru_cache(maxsize=65536)
def _cached_shape(counts: tuple[tuple[str, int], ...]) -> GpuShape:
    ordered = sorted(Counter(counts).items(), key=lambda item: (item[0][0], -item[0][1]))
    return GpuShape(tuple(GpuGroup(gpu, nodes, per_node) for (gpu, per_node), nodes in ordered))


def canonical_gpu_counts(min_gpus: int, max_gpus: int, gpus_per_node: int) -> tuple[int, ...]:
    """The GPU counts of a range that curves are solved for ahead of need: its ends, single GPUs up to a node,
    whole nodes beyond."""
    inside = range(min_gpus, min(max_gpus, gpus_per_node) + 1)
    whole = range(gpus_per_node * (min_gpus // gpus_per_node), max_gpus + 1, gpus_per_node)
    return tuple(sorted({min_gpus, max_gpus, *inside, *(count for count in whole if count >= min_gpus and count > 0)}))
