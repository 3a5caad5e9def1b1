"""Suggestions for misspelled names."""

from __future__ import annotations

import pytest

from scheduler.domain.suggestions import suggest
from scheduler.solver.profiles.catalog import list_gpu_names, list_model_names


@pytest.mark.parametrize(
    ("name", "similar"),
    [
        ("lama-2-7b", "llama-2-7b"),
        ("Llama-2-7B", "llama-2-7b"),
        ("a100-80gb", "a100-80g"),
        ("mixtral8x7b", "mixtral-8x7b"),
    ],
)
def test_similar_name_is_suggested(name: str, similar: str) -> None:
    assert suggest(name, (*list_gpu_names(), *list_model_names())) == f"; did you mean {similar!r}?"


@pytest.mark.parametrize("name", ["", "something-else-entirely", "42"])
def test_dissimilar_name_gets_no_suggestion(name: str) -> None:
    assert suggest(name, list_model_names()) == ""
