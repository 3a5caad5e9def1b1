"""The strategy space: what the evaluator allows is what its definition says, and the search leaves no part of it out
that could win (test_solver_brute_force)."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from math import gcd

from scheduler.solver.costs.layer_chain import build_layer_chain
from scheduler.solver.costs.strategy_space import DegreeLimits, list_divisors
from scheduler.solver.plan_rules import find_strategy_error
from scheduler.solver.profiles.hardware_profile import Dimension
from tests.properties.plan_space import allowed_strategies
from tests.properties.toy_requests import toy_request
from tests.unit.solver.costs.drawn import every_strategy

REQUESTS = 60


def test_the_evaluator_allows_exactly_the_strategies_of_the_definition() -> None:
    verdicts: Counter[bool] = Counter()
    for number in range(REQUESTS):
        seeded = random.Random(f"space {number}")
        drawn = toy_request(seeded, gpus=[1, 2, 3, 4, 6, 8], layers=[1, 2, 3])
        dimensions = frozenset(one for one in Dimension if seeded.random() < 0.8) | {Dimension.DATA}
        request = replace(drawn, hardware=(replace(drawn.hardware[0], dimensions=dimensions),))
        group = request.groups[0]
        width = seeded.choice(list_divisors(group.gpus))
        samples = seeded.choice([1, 2, 6, 12, 24])
        setting = group.build_stage_setting(width, samples)
        limits = DegreeLimits.from_layers(
            build_layer_chain(request.model, group.hardware.precision, stages=group.gpus // width)
        )
        allowed = set(allowed_strategies(request.model, group, width, samples))
        for strategy in every_strategy(width, gcd(*(run.experts for run in request.model.layers)) or 2):
            fault = find_strategy_error(strategy, limits, setting, samples)
            assert (fault == "") == (strategy in allowed), f"{strategy}: {fault or 'allowed'}"
            verdicts[fault == ""] += 1
            allowed.discard(strategy)
        assert not allowed
    assert verdicts[True] > 500
    assert verdicts[False] > 5000
