"""A rank that trains in step with another one: `straggling_rank.py SLOW_RANK SECONDS`.

SLOW_RANK is stopped for two thirds of the time by a child process, as a device that others use would be.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import ebbtide
import ebbtide.speed_probe

ebbtide.speed_probe.PERIOD_S = 0.3


def slow_down(pid: int) -> None:
    """Stop and continue a process until it has ended."""
    while os.getppid() == pid:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.02)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.01)


def train(seconds: float) -> None:
    with ebbtide.Session.from_environment() as session:
        session.init_process_group()
        session.mark_resumed(0)
        end_s, step = time.monotonic() + seconds, 0
        while True:
            gradient = torch.tensor([time.monotonic() > end_s], dtype=torch.int64)
            dist.all_reduce(gradient)
            step += 1
            session.report(step=step)
            session.poll_notice()
            if gradient.item():
                break
        session.succeed()


if int(os.environ["RANK"]) == int(sys.argv[1]):
    own_pid = os.getpid()
    if os.fork() == 0:
        slow_down(own_pid)
        os._exit(0)
train(float(sys.argv[2]))
