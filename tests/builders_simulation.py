"""Results of simulations with random values."""

from __future__ import annotations

from random import Random

from scheduler.simulator.report import PolicySeries


def build_policy_series(policy: str, points: int = 200) -> PolicySeries:
    """Return series that the name of the policy set determines."""
    random = Random(policy)

    def draw(most: float) -> tuple[float, ...]:
        return tuple(most * random.random() for _ in range(points))

    return PolicySeries(
        policy=policy,
        start_s=0.0,
        step_s=60.0,
        submitting_s=54.0 * points,
        queued_jobs=draw(90.0),
        training_usage_ratio=draw(1.0),
        inference_usage_ratio=draw(1.0),
        inference_gpus=800.0,
        inference_nodes=100,
        lent_nodes=draw(100.0),
        demand_gpus=draw(800.0),
        forecast_gpus=draw(800.0),
        jct_s=tuple(sorted(draw(9e3))),
    )
