"""Suggestions for misspelled names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_SIMILARITY_MIN = 0.7


def suggest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` if a known name is similar to `name`, else an empty string."""
    by_folded = {each.casefold(): each for each in known}
    near = get_close_matches(name.casefold(), by_folded, n=1, cutoff=_SIMILARITY_MIN)
    return f"; did you mean {by_folded[near[0]]!r}?" if near else ""
