"""Learning from measured steps: any reports give the same bounded state again, and no owner moves others far."""

from __future__ import annotations

from math import isfinite

from hypothesis import given
from hypothesis import strategies as st

from scheduler.domain.codec import decode, encode
from scheduler.domain.step_measurements import ROWS_MAX, ModelMeasurements, StepMeasurement, record_measurement
from scheduler.learning.owner_pooling import INFLUENCE_MAX, OwnerRows, predict_for_owner
from scheduler.learning.plan_features import PlanFeatures

OWNERS, MODELS = ("a", "b", "c", "d", "e"), ("m", "n")
RATIOS = st.floats(min_value=1e-3, max_value=1e3)


@st.composite
def plans(draw: st.DrawFn) -> PlanFeatures:
    weights = draw(st.tuples(*[st.floats(0.0, 1.0)] * 5))
    terms = tuple(weight / (sum(weights) + 0.1) for weight in (*weights, 0.1))
    return PlanFeatures(terms, draw(st.tuples(st.integers(0, 5).map(float), st.integers(0, 5).map(float))))


@st.composite
def rows_of_owner(draw: st.DrawFn) -> OwnerRows:
    def measured(model: str) -> st.SearchStrategy[tuple[StepMeasurement, ...]]:
        row = st.builds(
            lambda plan, ratio: StepMeasurement.from_ratio(model, "", plan.terms, plan.layout, ratio), plans(), RATIOS
        )
        return st.lists(row, min_size=1, max_size=6).map(tuple)

    return draw(st.fixed_dictionaries({}, optional={model: measured(model) for model in MODELS}))


@given(st.dictionaries(st.sampled_from(OWNERS), rows_of_owner()), rows_of_owner(), rows_of_owner(), plans())
def test_false_reports_of_one_owner_move_predictions_of_others_by_at_most_2_percent(
    measured: dict[str, OwnerRows], honest: OwnerRows, false: OwnerRows, asked: PlanFeatures
) -> None:
    for owner in (*OWNERS, "newcomer"):
        with_honest, with_false, without = (
            predict_for_owner({**measured, **liar}, owner, "m", asked).log_mean
            for liar in ({"liar": honest}, {"liar": false}, {})
        )
        assert abs(with_honest - with_false) <= INFLUENCE_MAX + 1e-9
        assert abs(with_false - without) <= INFLUENCE_MAX + 1e-9


@given(st.dictionaries(st.sampled_from(OWNERS), rows_of_owner()), plans())
def test_contradicting_measurements_give_a_finite_prediction(
    measured: dict[str, OwnerRows], asked: PlanFeatures
) -> None:
    factor = predict_for_owner(measured, "a", "m", asked)
    low, high = factor.interval
    assert isfinite(factor.log_mean)
    assert 0.0 < low < factor.mean < high < float("inf")


@st.composite
def reports(draw: st.DrawFn) -> tuple[str, StepMeasurement]:
    plan = draw(plans())
    job, owner = draw(st.integers(0, 30)), draw(st.sampled_from(OWNERS))
    row = StepMeasurement.from_ratio(f"j{job}", owner, plan.terms, plan.layout, draw(RATIOS))
    return f"a100 {draw(st.sampled_from(MODELS))}", row


@given(st.lists(reports(), max_size=60))
def test_the_same_reports_give_the_same_bounded_state_again(sequence: list[tuple[str, StepMeasurement]]) -> None:
    def replay() -> dict[str, ModelMeasurements]:
        known: dict[str, ModelMeasurements] = {}
        for number, (key, row) in enumerate(sequence):
            known = dict(record_measurement(known, key, row, float(number)))
        return known

    known = replay()
    assert known == replay()
    for each in known.values():
        assert len(each.rows) <= ROWS_MAX
        assert decode(ModelMeasurements, encode(each)) == each
