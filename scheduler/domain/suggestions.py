"""Suggestions for misspelled names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_SIMILARITY_MIN = 0.7


def suggest(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """Return `; did you mean 'x'?` if a known name is similar to `name`, else an empty string.

    Args:
        prefix: beginning of all names, which makes none of them similar.
    """
    by_folded = {each.removeprefix(prefix).casefold(): each for each in known}
    near = get_close_matches(name.removeprefix(prefix).casefold(), by_folded, n=1, cutoff=_SIMILARITY_MIN)
    return f"; did you mean {by_folded[near[0]]!r}?" if near else ""
