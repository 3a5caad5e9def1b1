"""Labels of jobs and label selectors: the rules and the grammar of Kubernetes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.domain.job_labels import (
    LABELS_MAX,
    REQUIREMENTS_MAX,
    VALUES_MAX,
    LabelOperator,
    LabelRequirement,
    LabelSelector,
    SelectorError,
    compute_label_changes,
    find_label_problem,
    is_label_key,
    is_label_value,
    is_reserved_key,
    merge_labels,
    parse_selector,
)

KEYS = st.sampled_from(["team", "tier", "in", "notin", "example.com/Team_1", "a.b-c/x"])
VALUES = st.sampled_from(["", "vision", "dev", "in", "1.2", "A_b-c", "x" * 63])
LABELS = st.dictionaries(KEYS, VALUES)
REQUIREMENTS = st.one_of(
    st.builds(
        LabelRequirement,
        KEYS,
        st.sampled_from([LabelOperator.IN, LabelOperator.NOT_IN]),
        st.sets(VALUES, min_size=1).map(lambda values: tuple(sorted(values))),
    ),
    st.builds(LabelRequirement, KEYS, st.sampled_from([LabelOperator.EXISTS, LabelOperator.ABSENT])),
)
SELECTORS = st.lists(REQUIREMENTS, max_size=4).map(tuple)
SPACE = st.sampled_from(["", " ", "\t "])


def write(selector: LabelSelector, space: str) -> str:
    return f"{space},{space}".join(write_requirement(each, space) for each in selector)


def write_requirement(each: LabelRequirement, space: str) -> str:
    match each.operator:
        case LabelOperator.EXISTS:
            return each.key
        case LabelOperator.ABSENT:
            return f"!{space}{each.key}"
    if len(each.values) == 1:
        sign = "=" if each.operator is LabelOperator.IN else "!="
        return f"{each.key}{space}{sign}{space}{each.values[0]}"
    return f"{each.key} {each.operator}{space}({space}{f'{space},{space}'.join(each.values)}{space})"


@given(SELECTORS, SPACE)
def test_a_written_selector_is_parsed_back(selector: LabelSelector, space: str) -> None:
    assert parse_selector(write(selector, space)) == selector


@given(st.text(alphabet="ab=!(), in-/.", max_size=20))
def test_any_text_is_a_selector_or_refused(text: str) -> None:
    try:
        selector = parse_selector(text)
    except SelectorError:
        return
    assert all(is_label_key(each.key) and all(map(is_label_value, each.values)) for each in selector)
    assert parse_selector(write(selector, " ")) == selector


@pytest.mark.parametrize(
    "text",
    [
        ",", "a,", ",a", "a,,b", "a b", "!", "!!a", "!a=b", "a=b=c", "a in", "a in b", "a in (b", "a in (b c)",
        "a in (b,c))", "(a)", "=a", "a=(b)", "a>3", "a=b c", "-a", "a-", "a/b/c", "/a", "A.com/a", "a=-b",
        f"a={'x' * 64}", "x" * 64, "a" * 2001,
        ",".join(f"k{number}" for number in range(REQUIREMENTS_MAX + 1)),
        f"k in ({','.join(map(str, range(VALUES_MAX + 1)))})",
    ],
)  # fmt: skip
def test_malformed_selectors_are_refused(text: str) -> None:
    with pytest.raises(SelectorError):
        parse_selector(text)


@pytest.mark.parametrize(
    ("text", "matched"),
    [
        ("team=vision", {"a", "b"}),
        ("team==vision", {"a", "b"}),
        ("team!=vision", {"c", "d"}),
        ("team", {"a", "b", "c"}),
        ("!team", {"d"}),
        ("team in (vision,speech)", {"a", "b", "c"}),
        ("team notin (vision)", {"c", "d"}),
        ("team=vision,tier!=dev", {"a"}),
        ("tier=", {"c"}),
        ("", {"a", "b", "c", "d"}),
    ],
)
def test_selectors_match_as_in_kubernetes(text: str, matched: set[str]) -> None:
    jobs = {
        "a": {"team": "vision"},
        "b": {"team": "vision", "tier": "dev"},
        "c": {"team": "speech", "tier": ""},
        "d": {"tier": "prod"},
    }
    selector = parse_selector(text)
    assert {name for name, labels in jobs.items() if all(each.matches(labels) for each in selector)} == matched


@pytest.mark.parametrize(
    ("labels", "key"),
    [
        ({f"k{number}": "" for number in range(LABELS_MAX + 1)}, ""),
        ({"": "a"}, ""),
        ({"a b": "c"}, "a b"),
        ({"ebbtide.dev/job": "a"}, "ebbtide.dev/job"),
        ({"team": "vision", "tier": "a b"}, "tier"),
        ({f"{'a.' * 127}com/x": ""}, f"{'a.' * 127}com/x"),
    ],
)
def test_invalid_labels_are_found(labels: dict[str, str], key: str) -> None:
    problem = find_label_problem(labels)
    assert problem is not None
    assert problem.key == key


def test_a_full_set_of_labels_has_no_problem() -> None:
    assert find_label_problem({f"example.com/k{number}": "v" for number in range(LABELS_MAX)}) is None
    assert is_reserved_key("x.ebbtide.dev/a")
    assert not is_reserved_key("ebbtide.dev")


@given(LABELS, LABELS)
def test_changes_lead_from_one_set_to_the_other(before: dict[str, str], after: dict[str, str]) -> None:
    changes = compute_label_changes(before, after)
    assert merge_labels(before, changes) == after
    assert not any(before.get(key) == value for key, value in changes.items())
