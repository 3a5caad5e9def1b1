"""A rank that meets the others of its group and records who came: `meeting_rank.py FOLDER [gloo]`.

Without `gloo`, it needs the standard library only: rank 0 serves MASTER_PORT as torch's store does.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

TIMEOUT_S = 60.0

Member = list[object]


def meet(me: Member, world_size: int) -> list[Member]:
    """Return the members of the group, as rank 0 met them."""
    if me[2] == 0:
        return serve(me, world_size)
    deadline_s = time.monotonic() + TIMEOUT_S
    while True:
        try:
            connection = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), 1.0)
            break
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.02)
    connection.settimeout(TIMEOUT_S)
    with connection, connection.makefile("rw") as stream:
        print(json.dumps(me), file=stream, flush=True)
        members: list[Member] = json.loads(stream.readline())
        return members


def serve(me: Member, world_size: int) -> list[Member]:
    members, streams = [me], []
    with socket.create_server(("", int(os.environ["MASTER_PORT"]))) as server:
        server.settimeout(TIMEOUT_S)
        for _ in range(world_size - 1):
            stream = server.accept()[0].makefile("rw")
            members.append(json.loads(stream.readline()))
            streams.append(stream)
        for stream in streams:
            print(json.dumps(members), file=stream, flush=True)
    return members


def meet_with_gloo(me: Member, world_size: int) -> list[Member]:
    import torch.distributed

    torch.distributed.init_process_group("gloo")
    members: list[Member] = [[] for _ in range(world_size)]
    torch.distributed.all_gather_object(members, me)
    torch.distributed.destroy_process_group()
    return members


def main(folder: Path, kind: str) -> None:
    env = os.environ
    me: Member = [env["EBBTIDE_JOB_ID"], int(env["EBBTIDE_GENERATION"]), int(env["RANK"])]
    members = (meet_with_gloo if kind == "gloo" else meet)(me, int(env["WORLD_SIZE"]))
    folder.joinpath(f"{me[0]}-{me[1]}-{me[2]}.members").write_text(json.dumps(sorted(members)))


main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
