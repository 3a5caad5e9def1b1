"""Sets of exact GPUs, as node name -> ascending GPU indices, and the little algebra on them.

Plain mappings, because they travel into JSON, SQL and logs unchanged. A node without GPUs has no entry.
Where the order counts they are `Seats`: one (node, GPU index) for each rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

Gpus = Mapping[str, tuple[int, ...]]
Seats = tuple[tuple[str, int], ...]

NO_GPUS: Gpus = {}


def count(gpus: Gpus) -> int:
    return sum(map(len, gpus.values()))


def union(left: Gpus, right: Gpus) -> Gpus:
    if not left or not right:
        return left or right
    return {node: tuple(sorted({*left.get(node, ()), *right.get(node, ())})) for node in sorted({*left, *right})}


def minus(left: Gpus, right: Gpus) -> Gpus:
    if not right:
        return left
    rest = ((node, tuple(i for i in indices if i not in right.get(node, ()))) for node, indices in left.items())
    return {node: indices for node, indices in rest if indices}


def common(left: Gpus, right: Gpus) -> Gpus:
    both = ((node, tuple(i for i in indices if i in right.get(node, ()))) for node, indices in left.items())
    return {node: indices for node, indices in both if indices}


def without_nodes(gpus: Gpus, nodes: Iterable[str]) -> Gpus:
    gone = frozenset(nodes)
    return {node: indices for node, indices in gpus.items() if node not in gone}


def seats(gpus: Gpus, *, first: Collection[str]) -> Seats:
    """All GPUs, node by node: the nodes of `first` before the others, both by name."""
    nodes = sorted(gpus, key=lambda node: (node not in first, node))
    return tuple((node, index) for node in nodes for index in gpus[node])


def text(gpus: Gpus) -> str:
    """For people: `t0[0-1] t1[0,3]`."""
    return " ".join(f"{node}[{_ranges(indices)}]" for node, indices in sorted(gpus.items())) or "none"


def counted(gpus: int) -> str:
    """For people: `1 GPU`, `3 GPUs`."""
    return "1 GPU" if gpus == 1 else f"{gpus} GPUs"


def _ranges(indices: tuple[int, ...]) -> str:
    if len(indices) > 1 and indices[-1] - indices[0] == len(indices) - 1:
        return f"{indices[0]}-{indices[-1]}"
    return ",".join(map(str, indices))
