"""Readings of a GPU that must not wait for it: the loss and the speed probe, with a stand-in for CUDA."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from ebbtide import loss_reader
from ebbtide.loss_reader import LossReader
from ebbtide.speed_probe import WINDOW, SpeedProbe


class Event:
    """An event of a GPU that finishes when the test says so."""

    is_over = False

    def __init__(self, *, enable_timing: bool = False) -> None:
        self._is_timed = enable_timing

    def record(self) -> None: ...

    def query(self) -> bool:
        return Event.is_over

    def elapsed_time(self, _end: Event) -> float:
        assert self._is_timed
        return 4.0


@pytest.fixture
def event(monkeypatch: pytest.MonkeyPatch) -> type[Event]:
    monkeypatch.setattr(Event, "is_over", False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    return Event


def test_probe_of_a_gpu_counts_once_the_gpu_has_finished_it(
    event: type[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda _shape, **_keywords: zeros(2, 2))
    probe = SpeedProbe()
    probe.run("cuda:1")
    event.is_over = True
    readings = [probe.median_s]
    for _ in range(WINDOW - 1):
        probe.run("cuda:1")
        readings.append(probe.median_s)
    assert readings == [None] * (WINDOW - 1) + [0.004]


def test_loss_on_the_host_is_read_once_per_period(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    reader = LossReader()
    assert reader.read(torch.tensor(1.5)) == 1.5
    assert reader.read(torch.tensor(2.5)) is None
    now_s[0] += loss_reader.PERIOD_S
    assert reader.read(torch.tensor(3.5)) == 3.5


def test_loss_on_a_gpu_is_read_when_its_copy_has_arrived(event: type[Event], monkeypatch: pytest.MonkeyPatch) -> None:
    def start_copy(reader: Any, loss: torch.Tensor) -> Event:
        reader._host = loss.double()
        return event()

    monkeypatch.setattr(LossReader, "_start_copy", start_copy)
    monkeypatch.setattr(loss_reader, "_is_on_gpu", lambda _loss: True)
    reader = LossReader()
    assert reader.read(torch.tensor(1.5)) is None
    assert reader.read(torch.tensor(9.0)) is None
    event.is_over = True
    assert reader.read(torch.tensor(9.0)) == 1.5
    assert reader.read(torch.tensor(9.0)) is None
