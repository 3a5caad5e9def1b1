"""Sets of GPUs: exact GPUs by node, free GPUs of a node, and the shape of a set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

Gpus = Mapping[str, tuple[int, ...]]
"""GPU indices by node name, ascending. A node without GPUs has no entry. Stored as JSON without conversion."""

RankPlacement = tuple[tuple[str, int], ...]
"""The (node, GPU index) of each rank."""

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
    """Assign one GPU to each rank, node by node: the nodes in `first`, then the others, both sorted by name."""
    nodes = sorted(gpus, key=lambda node: (node not in first, node))
    return tuple((node, index) for node in nodes for index in gpus[node])


def format_gpus(gpus: Gpus) -> str:
    """Format GPUs for people, for example `t0[0-1] t1[0,3]`."""
    return " ".join(f"{node}[{_format_indices(indices)}]" for node, indices in sorted(gpus.items())) or "none"


def format_gpu_count(gpus: int, model: str = "") -> str:
    """Format a count for people: `1 GPU`, `3 GPUs`, `3 a100-80g GPUs`."""
    return f"{gpus}{f' {model}' if model else ''} GPU{'' if gpus == 1 else 's'}"


def _format_indices(indices: tuple[int, ...]) -> str:
    if len(indices) > 1 and indices[-1] - indices[0] == len(indices) - 1:
        return f"{indices[0]}-{indices[-1]}"
    return ",".join(map(str, indices))


@dataclass(frozen=True, slots=True)
class FreeGpus:
    """Free GPUs of one node on which training may start ranks."""

    node: str
    gpu: str
    is_lent: bool
    indices: tuple[int, ...]

    def without(self, taken: tuple[int, ...]) -> FreeGpus:
        return FreeGpus(self.node, self.gpu, self.is_lent, tuple(index for index in self.indices if index not in taken))


@dataclass(frozen=True, slots=True, order=True)
class GpuGroup:
    """`nodes` hosts that provide `gpus_per_node` GPUs of one model each."""

    gpu: str
    nodes: int
    gpus_per_node: int

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.gpus_per_node < 1:
            raise ValueError(f"nodes and gpus_per_node must be at least 1, got {self.nodes} and {self.gpus_per_node}")

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    def __str__(self) -> str:
        return f"{self.nodes}x{self.gpus_per_node} {self.gpu}"


@dataclass(frozen=True, slots=True, order=True)
class GpuShape:
    """The properties of an allocation that a parallel plan depends on: groups of equal nodes, largest share first.

    A shape names no nodes. Two jobs on different nodes of the same kind have equal shapes and share one solved plan.
    """

    groups: tuple[GpuGroup, ...]
    _hash: int = field(init=False, compare=False, repr=False, default=0, metadata={"derived": True})

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self.groups))

    def __hash__(self) -> int:
        """Return the stored hash, because curves are looked up by shape many times in each tick."""
        return self._hash

    def __reduce__(self) -> tuple[type[GpuShape], tuple[tuple[GpuGroup, ...]]]:
        """Rebuild the hash in the receiving process, because string hashes differ between processes."""
        return GpuShape, (self.groups,)

    @classmethod
    def from_node_counts(cls, counts: Iterable[tuple[str, int]]) -> GpuShape:
        """Return the shape of an allocation, given as one (GPU model, GPUs) pair per node."""
        return _build_shape_of_counts(tuple(sorted(counts)))

    @classmethod
    def packed(cls, gpu: str, gpus: int, gpus_per_node: int) -> GpuShape:
        """Return the canonical shape: as few nodes as possible, all full except the last."""
        full, rest = divmod(gpus, gpus_per_node)
        return cls.from_node_counts([(gpu, gpus_per_node)] * full + ([(gpu, rest)] if rest else []))

    @property
    def gpus(self) -> int:
        return sum(group.gpus for group in self.groups)

    @property
    def nodes(self) -> int:
        return sum(group.nodes for group in self.groups)

    @property
    def is_mixed(self) -> bool:
        """Whether the shape has GPUs of several models."""
        return any(group.gpu != self.groups[0].gpu for group in self.groups)

    def __str__(self) -> str:
        return " + ".join(str(group) for group in self.groups)


@lru_cache(maxsize=65536)
def _build_shape_of_counts(counts: tuple[tuple[str, int], ...]) -> GpuShape:
    ordered = sorted(Counter(counts).items(), key=lambda item: (item[0][0], -item[0][1]))
    return GpuShape(tuple(GpuGroup(gpu, nodes, per_node) for (gpu, per_node), nodes in ordered))


def canonical_gpu_counts(min_gpus: int, max_gpus: int, gpus_per_node: int) -> tuple[int, ...]:
    """Return the GPU counts of a range for which curves are solved in advance.

    These are both ends of the range, every count up to one node, and multiples of a node.
    """
    inside = range(min_gpus, min(max_gpus, gpus_per_node) + 1)
    whole = range(gpus_per_node * (min_gpus // gpus_per_node), max_gpus + 1, gpus_per_node)
    return tuple(sorted({min_gpus, max_gpus, *inside, *(count for count in whole if count >= min_gpus and count > 0)}))
