"""Record of the loans that a pool in shadow mode would have made."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.domain.shadow_lending import ShadowLending, get_shadow

NODES = st.sets(st.sampled_from(["i0", "i1", "i2", "i3"])).map(lambda names: tuple(sorted(names)))
STEPS = st.lists(st.tuples(st.floats(0.0, 1000.0), NODES, st.floats(0.0, 32.0)), max_size=12)


def test_gpu_seconds_count_what_jobs_would_use() -> None:
    shadow = ShadowLending(0.0).change_loans(100.0, ("i0", "i1"), gpus=12.0, recalls=0)
    assert shadow.compute_gpu_s(160.0) == 720.0
    shadow = shadow.change_loans(160.0, ("i0",), gpus=8.0, recalls=1)
    assert (shadow.compute_gpu_s(170.0), shadow.loans, shadow.recalls) == (800.0, 2, 1)


def test_unchanged_loans_are_the_same_record() -> None:
    shadow = ShadowLending(0.0, ("i0",), 4.0)
    assert shadow.change_loans(50.0, ("i0",), gpus=4.0, recalls=0) is shadow
    assert get_shadow({"inference": shadow}, "inference", 9.0) is shadow
    assert get_shadow({}, "inference", 9.0).since_s == 9.0


@given(STEPS)
def test_gpu_seconds_are_the_integral_of_the_gpus(steps: list[tuple[float, tuple[str, ...], float]]) -> None:
    shadow, now_s, integral, begun = ShadowLending(0.0), 0.0, 0.0, 0
    for pause_s, nodes, gpus in steps:
        integral += shadow.gpus * pause_s
        now_s += pause_s
        begun += len(set(nodes) - set(shadow.nodes))
        shadow = shadow.change_loans(now_s, nodes, gpus=gpus, recalls=0)
    assert shadow.compute_gpu_s(now_s) == pytest.approx(integral)
    assert shadow.loans == begun
