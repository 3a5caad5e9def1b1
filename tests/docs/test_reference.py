"""Every option, setting, route, field and metric has a description that says more than its name."""

from __future__ import annotations

import re

import pytest

from tools.reference_pages import Entry, build_pages, list_entries

FILLER = {"a", "an", "and", "by", "for", "in", "is", "it", "its", "of", "on", "or", "that", "the", "this", "to", "with"}


def says_more_than_its_name(entry: Entry) -> bool:
    """Whether the description has at least two words that neither the name nor the subject contains."""
    known = words_of(f"{entry.name} {entry.subject}") | FILLER
    return len(words_of(entry.description) - known) >= 2


def words_of(text: str) -> set[str]:
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text)
    return {word.lower() for word in re.findall(r"[A-Za-z]+|\d+", spaced.replace("_", " "))}


@pytest.mark.parametrize(
    ("name", "description", "accepted"),
    [
        ("queue", "", False),
        ("queue", "The queue.", False),
        ("max_gpus", "Max GPUs of the job.", False),
        ("max_gpus", "Most GPUs that the job may hold at once.", True),
    ],
)
def test_blank_and_echoing_descriptions_are_recognized(name: str, description: str, accepted: bool) -> None:
    assert says_more_than_its_name(Entry("Job", name, description)) is accepted


def test_every_entry_of_the_reference_is_described() -> None:
    entries = list(list_entries())
    assert len(entries) > 1000
    echoes = [
        f"{entry.subject}: {entry.name}: {entry.description!r}"
        for entry in entries
        if not says_more_than_its_name(entry)
    ]
    assert echoes == []


def test_every_page_has_content() -> None:
    assert {name: len(text) > 500 for name, text in build_pages().items()} == dict.fromkeys(build_pages(), True)
