"""The evaluation accepts exactly the strategies of the definition. test_solver_brute_force shows that the search
omits none that could win."""

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
from tests.unit.solver.costs.random_layers import enumerate_strategies

REQUESTS = 60


def test_plan_rules_match_the_strategy_space_definition() -> None:
    verdicts: Counter[bool] = Counter()
    for number in range(REQUESTS):
        rng = random.Random(f"space {number}")
        drawn = toy_request(rng, gpus=[1, 2, 3, 4, 6, 8], layers=[1, 2, 3])
        dimensions = frozenset(dimension for dimension in Dimension if rng.random() < 0.8) | {Dimension.DATA}
        request = replace(drawn, hardware=(replace(drawn.hardware[0], dimensions=dimensions),))
        group = request.groups[0]
        width = rng.choice(list_divisors(group.gpus))
        samples = rng.choice([1, 2, 6, 12, 24])
        setting = group.build_stage_setting(width, samples)
        limits = DegreeLimits.from_layers(
            build_layer_chain(request.model, group.hardware.precision, stages=group.gpus // width)
        )
        allowed = set(allowed_strategies(request.model, group, width, samples))
        for strategy in enumerate_strategies(width, gcd(*(run.experts for run in request.model.layers)) or 2):
            fault = find_strategy_error(strategy, limits, setting, samples)
            assert (fault == "") == (strategy in allowed), f"{strategy}: {fault or 'allowed'}"
            verdicts[fault == ""] += 1
            allowed.discard(strategy)
        assert not allowed
    assert verdicts[True] > 500
    assert verdicts[False] > 5000
