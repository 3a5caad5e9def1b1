"""A job's script that computes on its GPU, says what it sees, and stays until it is ended."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch


def main(record: Path, seconds: float) -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    side = 2048
    values = torch.ones(side, side, device=device)
    found = {
        "visible": os.environ["CUDA_VISIBLE_DEVICES"],
        "devices": torch.cuda.device_count(),
        "uuid": str(torch.cuda.get_device_properties(device).uuid),
        "product": (values @ values)[0, 0].item() / side,
        "uid": os.getuid(),
        "nodes": sorted(path.name for path in Path("/dev").glob("nvidia*")),
    }
    part = record.with_suffix(".part")
    part.write_text(json.dumps(found))
    part.rename(record)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        values = (values @ values) / side
        torch.cuda.synchronize()
    print("done", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
