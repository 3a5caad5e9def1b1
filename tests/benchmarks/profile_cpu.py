"""`python -m tests.benchmarks.profile_cpu OUT [SECONDS]`: profile a CPU with four ranks, and validate that.

It needs an otherwise idle machine. It begins no measurement after SECONDS (default 330), half of them for the profile.
The exit status is that of `ebbtide profile`, or 1 if the median error is above 15% in time or 10% in memory.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.cuda.profile_gpu import profile_and_validate

TIME_ERROR_MAX, MEMORY_ERROR_MAX = 0.15, 0.10


def main(out: Path, limit_s: str = "330") -> int:
    words = ["--device", "cpu", "--ranks", "4", "--rounds", "2", "--time-limit", limit_s, "--allow-busy"]
    return profile_and_validate(
        out / "cpu.json", words, time_error_max=TIME_ERROR_MAX, memory_error_max=MEMORY_ERROR_MAX
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:3]))
