"""Run torchtitan's trainer as its command line does, with a reader of JSON lines where `datasets` is missing."""

from __future__ import annotations

import json
import random
import runpy
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any


class Dataset:
    """The part of `datasets.Dataset` that torchtitan uses."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)

    def skip(self, count: int) -> Dataset:
        return Dataset(self._rows[count:])

    def shuffle(self, *, seed: int) -> Dataset:
        return Dataset(random.Random(seed).sample(self._rows, len(self._rows)))


def load_dataset(path: str, **_options: Any) -> Dataset:
    lines = [line for each in sorted(Path(path).glob("*.json")) for line in each.read_text().splitlines()]
    return Dataset([json.loads(line) for line in lines])


def split_dataset_by_node(dataset: Dataset, rank: int, world_size: int) -> Dataset:
    return Dataset(list(dataset)[rank::world_size])


def provide_datasets() -> None:
    package, distributed = ModuleType("datasets"), ModuleType("datasets.distributed")
    contents = {"Dataset": Dataset, "load_dataset": load_dataset, "distributed": distributed}
    vars(package).update(contents)
    vars(distributed)["split_dataset_by_node"] = split_dataset_by_node
    sys.modules.update({"datasets": package, "datasets.distributed": distributed})


def main() -> None:
    if find_spec("datasets") is None:
        provide_datasets()
    runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
