"""The hash chain of the audit log: the digest of each entry covers the digest of the entry before it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from scheduler.store.api_protocol import AuditEntry

PROBLEMS_MAX = 100


class ChainProblem(NamedTuple):
    """A break of the audit log's hash chain at an entry."""

    number: int
    problem: str


@dataclass(frozen=True, slots=True)
class ChainReport:
    """Result of verifying the audit log: `entries` have digests, and `digest` is that of the newest one."""

    is_chained: bool = False
    entries: int = 0
    first_number: int = 0
    last_number: int = 0
    digest: str = ""
    problems: tuple[ChainProblem, ...] = ()


@dataclass(frozen=True, slots=True)
class ChainedEntry:
    """A stored entry with its digest. An entry that was written without a chain has None."""

    number: int
    entry: AuditEntry
    digest: str | None


@dataclass(frozen=True, slots=True)
class ChainEnds:
    """What is stored apart from the entries: the digest of the newest one, and of the newest that retention deleted."""

    head: str = ""
    anchor: str = ""


def compute_digest(previous: str, entry: AuditEntry) -> str:
    """Return the digest of an entry that follows the entry with the digest `previous`."""
    # What the database returns has the same JSON form as what was written.
    content = json.loads(json.dumps([previous, asdict(entry)]))
    return sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def chain_entries(previous: str, entries: Sequence[AuditEntry]) -> list[str]:
    """Return the digests of new entries."""
    digests = list[str]()
    for entry in entries:
        previous = compute_digest(previous, entry)
        digests.append(previous)
    return digests


def verify_entries(entries: Iterable[ChainedEntry], ends: ChainEnds, *, expected: str = "") -> ChainReport:
    """Check all entries, oldest first.

    Args:
        expected: digest that the chain had at an earlier time; empty for none.
    """
    check = _ChainCheck(ends.anchor, is_found=expected in ("", ends.anchor, ends.head))
    problems = [problem for chained in entries for problem in check.examine(chained, expected)]
    if check.previous != ends.head:
        problems.append(ChainProblem(check.last_number, "the newest entries are missing: this one is not the last"))
    if not check.is_found:
        problems.append(ChainProblem(0, f"no entry has the digest {expected}"))
    return ChainReport(
        bool(ends.head), check.count, check.first_number, check.last_number, ends.head, tuple(problems[:PROBLEMS_MAX])
    )


class _ChainCheck:
    """Progress of a verification."""

    def __init__(self, anchor: str, *, is_found: bool) -> None:
        self.previous = anchor
        self.is_found = is_found
        self.count = self.first_number = self.last_number = 0

    def examine(self, chained: ChainedEntry, expected: str) -> Iterator[ChainProblem]:
        """Yield what is wrong with the next entry."""
        if chained.digest is None:
            if self.previous:
                yield ChainProblem(chained.number, "the entry has no digest: it was inserted, or written without chain")
            return
        if chained.digest != compute_digest(self.previous, chained.entry):
            yield ChainProblem(
                chained.number, "the entry was changed, or an entry before it was changed, removed, inserted or moved"
            )
        self.is_found |= chained.digest == expected
        self.previous, self.last_number = chained.digest, chained.number
        self.first_number = self.first_number or chained.number
        self.count += 1
