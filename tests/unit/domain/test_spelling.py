"""What is suggested for a name that nobody knows."""

from __future__ import annotations

import pytest

from scheduler.domain.suggestions import suggest
from scheduler.solver.profiles.catalog import list_gpu_names, list_model_names


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("lama-2-7b", "llama-2-7b"),
        ("Llama-2-7B", "llama-2-7b"),
        ("a100-80gb", "a100-80g"),
        ("mixtral8x7b", "mixtral-8x7b"),
    ],
)
def test_a_slip_gets_the_name_that_is_near(name: str, near: str) -> None:
    assert suggest(name, (*list_gpu_names(), *list_model_names())) == f"; did you mean {near!r}?"


@pytest.mark.parametrize("name", ["", "something-else-entirely", "42"])
def test_what_is_like_nothing_gets_no_advice(name: str) -> None:
    assert suggest(name, list_model_names()) == ""
