"""The cache of frozen blocks' outputs (PipeTransformer, ICML 2021, section 3.4: AutoCache).

The output of the last frozen block is stored once for each window of the text. Later passes over the text read it and
skip the frozen layers. Outputs stay valid when the parallel plan changes, because they are stored by window and token,
and when more blocks freeze: those of fewer blocks are then the input of the newly frozen ones.

The directory must be one that all ranks share. It has a folder for each number of frozen blocks, with a file per window
and the list of complete windows. A window is complete once all ranks have finished the step that stored it, so all
ranks agree on what they can read without a message. A step skips layers if all of its windows are complete. Each folder
takes windows x tokens x hidden values.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from scheduler.trainer.activation_sharding import TokenSharding, compute_token_shardings
from scheduler.trainer.layout import Layout
from scheduler.trainer.model_parts import BuildOptions

FindWindow = Callable[[int], int]
"""Return the window of the text that a sample number is."""


_LIST = "complete"
_BOOT = "boot"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class FrozenOutputStore:
    """Stored outputs of one training, by number of frozen blocks and window.

    `root` is extended by a digest of `identity`, so that a training never reads the outputs of another one.
    """

    def __init__(self, root: Path, identity: Mapping[str, Any]) -> None:
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
        self._root = root / digest
        self._complete: dict[int, set[int]] = {}

    def open(self, *, valid_blocks: int) -> None:
        """Delete outputs of more than `valid_blocks` frozen blocks, and load the lists of complete windows. Collective.

        Those outputs are of weights that this training does not have: it continues from an earlier checkpoint, or
        the blocks freeze only now. After a restart of rank 0's machine all outputs are deleted, because the list of
        complete windows may have reached the disk before the outputs.
        """
        if dist.get_rank() == 0:
            self._delete_invalid(valid_blocks)
        dist.barrier()
        folders = [path for path in self._root.iterdir() if path.is_dir()]
        self._complete = {int(folder.name): _read_list(folder / _LIST) for folder in folders}

    def _delete_invalid(self, valid_blocks: int) -> None:
        self._root.mkdir(parents=True, exist_ok=True)
        boot, record = _read_boot_id(), self._root / _BOOT
        is_same_boot = record.exists() and record.read_text() == boot
        for folder in self._root.iterdir():
            if folder.is_dir() and (not is_same_boot or int(folder.name) > valid_blocks):
                shutil.rmtree(folder)
        record.write_text(boot)

    def find_complete_blocks(self, windows: Sequence[int]) -> int:
        """Return the largest number of frozen blocks whose outputs are complete for all windows, or 0."""
        wanted = set(windows)
        return max((blocks for blocks, complete in self._complete.items() if wanted <= complete), default=0)

    def mark_complete(self, blocks: int, windows: Sequence[int]) -> None:
        """Record windows that all ranks have stored. Call on every rank, after a collective operation."""
        self._complete.setdefault(blocks, set()).update(windows)
        if dist.get_rank() == 0:
            with (self._root / str(blocks) / _LIST).open("a") as stream:
                stream.write("".join(f"{window}\n" for window in windows))

    def write(self, blocks: int, window: int, rows: Sequence[tuple[int, bytes]]) -> None:
        """Write the values of tokens: pairs of byte offset and content."""
        folder = self._root / str(blocks)
        folder.mkdir(exist_ok=True)
        descriptor = os.open(folder / str(window), os.O_WRONLY | os.O_CREAT)
        try:
            for offset, content in rows:
                os.pwrite(descriptor, content, offset)
        finally:
            os.close(descriptor)

    def read(self, blocks: int, window: int) -> bytearray:
        """Return the output of all tokens of a window."""
        return bytearray((self._root / str(blocks) / str(window)).read_bytes())


class FrozenOutputCache:
    """The stored outputs that this rank reads and writes under its layout, step by step."""

    def __init__(
        self, store: FrozenOutputStore, layout: Layout, options: BuildOptions, find_window: FindWindow
    ) -> None:
        self.store = store
        self.frozen_blocks = options.frozen_blocks
        self.tokens = options.size.sequence
        self._layout, self._options, self._find_window = layout, options, find_window
        self._shardings = compute_token_shardings(layout, options.size.sequence)
        self._rank = layout.rank_in_group(options.rank)
        self._windows: list[int] = []
        self._readable_blocks = 0
        self._parts: list[PartCache] = []

    def connect(self, layers: range) -> PartCache:
        """Return the cache of the model part with these layers."""
        part = PartCache(self, layers)
        self._parts.append(part)
        return part

    def begin_step(self, first_sample: int) -> None:
        """Look up what is complete for the samples of the step."""
        samples = range(first_sample, first_sample + self._layout.global_batch)
        self._windows = [self._find_window(sample) for sample in samples]
        self._readable_blocks = self.store.find_complete_blocks(self._windows)
        for part in self._parts:
            part.begin_step(self._readable_blocks)

    def finish_step(self) -> None:
        """Mark the step's windows as complete. Call after a collective operation that follows the step."""
        if self._readable_blocks < self.frozen_blocks:
            self.store.mark_complete(self.frozen_blocks, self._windows)

    def empty(self, layer: int) -> Tensor:
        """Return zeros in place of the output of `layer`, which no rank reads."""
        shape = (*self._shardings[layer].shape(self._rank), self._options.size.hidden)
        return torch.zeros(shape, dtype=self._options.dtype, device=self._options.device)

    def read(self, micro_batch: int, layer: int) -> Tensor:
        """Return this rank's part of the stored output of `layer`, of shape (samples, tokens, hidden)."""
        rows = []
        for window, positions in self._locate(micro_batch, self._shardings[layer]):
            content = torch.frombuffer(self.store.read(layer, window), dtype=self._options.dtype)
            rows.append(content.view(self.tokens, -1)[positions])
        return torch.stack(rows).to(self._options.device)

    def write(self, micro_batch: int, layer: int, output: Tensor) -> None:
        """Store this rank's part of the output of `layer`. Of equal copies, the first is stored."""
        sharding = self._shardings[layer]
        if self._rank % sharding.copies:
            return
        values = output.detach().cpu().contiguous().numpy()
        for row, (window, positions) in zip(values, self._locate(micro_batch, sharding), strict=True):
            breaks = np.flatnonzero(np.diff(positions.numpy()) != 1) + 1
            starts = [0, *breaks.tolist()]
            parts = np.split(row, breaks)
            token_bytes = row[0].nbytes
            runs = [(int(positions[at]) * token_bytes, part.tobytes()) for at, part in zip(starts, parts, strict=True)]
            self.store.write(layer, window, runs)

    def _locate(self, micro_batch: int, sharding: TokenSharding) -> list[tuple[int, Tensor]]:
        """Return the window and the token positions of each sample of this rank."""
        first = micro_batch * self._layout.micro_batch_size
        cells = sharding.token_indices[self._rank].view(sharding.shape(self._rank))
        return [(self._windows[first + int(row[0]) // self.tokens], row % self.tokens) for row in cells]


class PartCache:
    """The cache of one model part: which of its layers a forward pass skips, and which output it stores."""

    def __init__(self, cache: FrozenOutputCache, layers: range) -> None:
        self._cache, self._layers = cache, layers
        self._readable_blocks = 0
        self._micro_batch = -1

    def begin_step(self, readable_blocks: int) -> None:
        self._readable_blocks, self._micro_batch = readable_blocks, -1

    def begin_pass(self, inputs: Tensor) -> tuple[Tensor, int]:
        """Begin the forward pass of the next micro-batch. Return the input of a layer, and the number of this layer."""
        self._micro_batch += 1
        last, layers = self._readable_blocks, self._layers
        if not last or last < layers.start:
            return inputs, layers.start
        outputs = self._cache.read(self._micro_batch, last) if last in layers else self._cache.empty(layers.stop - 1)
        if inputs.requires_grad:
            outputs = outputs + 0.0 * inputs.sum()  # torch's pipeline stages require a gradient of each input
        return outputs, min(last + 1, layers.stop)

    def store_output(self, layer: int, output: Tensor) -> None:
        """Store the output of the last frozen block."""
        if layer == self._cache.frozen_blocks:
            self._cache.write(self._micro_batch, layer, output)


def _read_list(path: Path) -> set[int]:
    return {int(line) for line in path.read_text().splitlines()} if path.exists() else set()


def _read_boot_id() -> str:
    """Return an id that changes when the machine restarts (Linux)."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
