"""A rank that prints its number and reports what it sees: `reporting_rank.py FOLDER SECONDS`. It needs no package."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

NAMES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "OMP_NUM_THREADS", "EBBTIDE_GENERATION", "EBBTIDE_NODE"),
)


def write(path: Path, text: str) -> None:
    part = path.with_suffix(f"{path.suffix}.part")
    part.write_text(text)
    part.replace(path)


def main(folder: Path, seconds: float) -> None:
    seen: dict[str, object] = {name: os.environ.get(name) for name in NAMES}
    seen |= {"pid": os.getpid(), "uid": os.getuid(), "cwd": str(Path.cwd()), "started_s": time.time()}
    name = f"{os.environ['EBBTIDE_JOB_ID']}-{seen['EBBTIDE_GENERATION']}-{seen['RANK']}"
    print("rank", seen["RANK"], "of", seen["WORLD_SIZE"])
    write(folder / f"{name}.json", json.dumps(seen))
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s:
        write(folder / f"{name}.alive", str(time.time()))
        time.sleep(0.05)
    (folder / f"{name}.end").write_text("done")


main(Path(sys.argv[1]), float(sys.argv[2]))
