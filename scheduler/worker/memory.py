"""What a rank knows of its memory: how much it has had, whether an error means that it ran out, and whom the kernel
killed for memory beside it. torch is asked only where the script has imported it."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

# RuntimeErrors of torch that have no class of their own.
_TEXTS = ("DefaultCPUAllocator: can't allocate memory", "CUDA error: out of memory")
_MAXRSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024


def peak_bytes() -> int:
    """The most memory that this process has had at once: allocated by torch on its GPU, else resident on the host."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT_BYTES


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error, or one that it was raised from, says that memory ran out."""
    return any(_says_so(each) for each in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__


def _says_so(error: BaseException) -> bool:
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


@dataclass(frozen=True, slots=True)
class OomKillCount:
    """The file in which the kernel counts whom it has killed for memory in a control group."""

    path: Path

    @classmethod
    def of_this_process(
        cls, *, own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
    ) -> Self | None:
        """None on a system that has no such file. cgroup v2 is looked for before v1."""
        try:
            lines = own.read_text(encoding="utf-8").splitlines()
        except OSError:
            return None
        groups = {controllers: path.lstrip("/") for _, controllers, path in (line.split(":", 2) for line in lines)}
        candidates: list[Path] = []
        if "" in groups:
            candidates += [root / groups[""] / name for name in ("memory.events.local", "memory.events")]
        if "memory" in groups:
            candidates.append(root / "memory" / groups["memory"] / "memory.oom_control")
        return next((cls(path) for path in candidates if path.is_file()), None)

    def read(self) -> int | None:
        """How many so far; None where the file does not say (any more)."""
        try:
            words = self.path.read_text(encoding="ascii").split()
        except OSError:
            return None
        return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words[:-1] else None
