"""Labels of jobs, and label selectors, by the rules and the grammar of Kubernetes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

LABELS_MAX = 32
RESERVED_DOMAIN = "ebbtide.dev"
"""Keys with this domain as their prefix are Ebbtide's own."""
KEY_FORM = (
    "1 to 63 letters, digits, '-', '_' and '.', starting and ending with a letter or digit, optionally after a DNS "
    "name and '/', such as team or example.com/team"
)
VALUE_FORM = (
    "at most 63 letters, digits, '-', '_' and '.', starting and ending with a letter or digit, or the empty string"
)
SELECTOR_FORM = (
    "requirements separated by commas, such as team=vision, tier!=dev, stage in (train,tune), stage notin (test), "
    "urgent or !urgent"
)
SELECTOR_LENGTH_MAX = 2000
REQUIREMENTS_MAX = 20
VALUES_MAX = 100
"""Most values of all requirements of a selector."""

_PREFIX_LENGTH_MAX = 253
_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", re.ASCII)
_DNS_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", re.ASCII)


def is_label_key(key: str) -> bool:
    prefix, slash, name = key.rpartition("/")
    if slash and not (len(prefix) <= _PREFIX_LENGTH_MAX and _DNS_NAME.fullmatch(prefix)):
        return False
    return _NAME.fullmatch(name) is not None


def is_label_value(value: str) -> bool:
    return not value or _NAME.fullmatch(value) is not None


def is_reserved_key(key: str) -> bool:
    prefix, slash, _ = key.rpartition("/")
    return bool(slash) and (prefix == RESERVED_DOMAIN or prefix.endswith(f".{RESERVED_DOMAIN}"))


@dataclass(frozen=True, slots=True)
class LabelProblem:
    """An invalid label. `key` is empty if the number of labels is the problem; `allowed` says what is accepted."""

    key: str
    value: str
    allowed: str


def find_label_problem(labels: Mapping[str, str]) -> LabelProblem | None:
    """Return the first problem of a job's labels, or None."""
    if len(labels) > LABELS_MAX:
        return LabelProblem("", f"{len(labels)} labels", f"at most {LABELS_MAX} labels; remove some")
    for key, value in labels.items():
        if not is_label_key(key):
            return LabelProblem(key, key, f"a key of {KEY_FORM}")
        if is_reserved_key(key):
            return LabelProblem(key, key, f"a key without the prefix {RESERVED_DOMAIN}/, which is reserved")
        if not is_label_value(value):
            return LabelProblem(key, value, VALUE_FORM)
    return None


def merge_labels(labels: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return the labels after changes, in the order of their keys. A change to None removes the label."""
    merged = {**labels, **changes}
    return {key: value for key, value in sorted(merged.items()) if value is not None}


def compute_label_changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    """Return the changes that turn the labels `before` into `after`."""
    return {key: after.get(key) for key in sorted({*before, *after}) if before.get(key) != after.get(key)}


def format_label_changes(changes: Mapping[str, str | None]) -> str:
    """Format changes: `team=vision, tier removed`."""
    return ", ".join(f"{key} removed" if value is None else f"{key}={value}" for key, value in changes.items())


class LabelOperator(StrEnum):
    IN = "in"
    NOT_IN = "notin"
    EXISTS = "exists"
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class LabelRequirement:
    """One condition on the labels of a job. NOT_IN includes jobs without the key.

    `values` belong to IN and NOT_IN, each once and in order.
    """

    key: str
    operator: LabelOperator
    values: tuple[str, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        match self.operator:
            case LabelOperator.IN:
                return labels.get(self.key) in self.values
            case LabelOperator.NOT_IN:
                return labels.get(self.key) not in self.values
            case LabelOperator.EXISTS:
                return self.key in labels
            case LabelOperator.ABSENT:
                return self.key not in labels


LabelSelector = tuple[LabelRequirement, ...]
"""Requirements that a job's labels must all meet. Empty: every job matches."""


class SelectorError(ValueError):
    """The text is no label selector. The message says which part is wrong."""


_TOKEN = re.compile(r"==|!=|[=!(),]|[^\s=!(),]+")
_SIGNS = frozenset("=!(),") | {"==", "!="}


def parse_selector(text: str) -> LabelSelector:
    """Parse a label selector: `team=vision,tier!=dev,stage in (train,tune),!debug`. Blank text selects every job.

    Raises:
        SelectorError: the text is no selector, or has too many requirements or values.
    """
    if len(text) > SELECTOR_LENGTH_MAX:
        raise SelectorError(f"it has {len(text)} characters; at most {SELECTOR_LENGTH_MAX} are accepted")
    tokens = _Tokens(_TOKEN.findall(text))
    requirements: list[LabelRequirement] = []
    while not tokens.is_at_end:
        if requirements:
            tokens.expect(",")
        requirements.append(_parse_requirement(tokens))
    if len(requirements) > REQUIREMENTS_MAX:
        raise SelectorError(f"it has {len(requirements)} requirements; at most {REQUIREMENTS_MAX} are accepted")
    if (values := sum(len(each.values) for each in requirements)) > VALUES_MAX:
        raise SelectorError(f"it has {values} values; at most {VALUES_MAX} are accepted")
    return tuple(requirements)


class _Tokens:
    """Signs and words of a selector, read from left to right. The end is an empty token."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = [*tokens, ""]
        self._at = 0

    @property
    def next(self) -> str:
        return self._tokens[self._at]

    @property
    def is_at_end(self) -> bool:
        return not self.next

    def take(self) -> str:
        token = self.next
        if token:
            self._at += 1
        return token

    def take_if(self, *wanted: str) -> bool:
        """Take the next token if it is one of `wanted`, and return whether it is."""
        is_wanted = self.next in wanted
        if is_wanted:
            self.take()
        return is_wanted

    def take_value(self) -> str:
        """Take a value, which is empty before a sign and at the end."""
        value = "" if self.next in _SIGNS else self.take()
        if not is_label_value(value):
            raise SelectorError(f"{value!r:.80} is no value of a label: {VALUE_FORM}")
        return value

    def expect(self, wanted: str) -> None:
        if not self.take_if(wanted):
            raise SelectorError(f"expected {wanted!r}, got {_describe(self.next)}")


def _parse_requirement(tokens: _Tokens) -> LabelRequirement:
    is_negated = tokens.take_if("!")
    key = tokens.take()
    if not is_label_key(key):
        raise SelectorError(f"expected the key of a label, got {_describe(key)}")
    if is_negated:
        return LabelRequirement(key, LabelOperator.ABSENT)
    if tokens.take_if("=", "=="):
        return LabelRequirement(key, LabelOperator.IN, (tokens.take_value(),))
    if tokens.take_if("!="):
        return LabelRequirement(key, LabelOperator.NOT_IN, (tokens.take_value(),))
    for operator in (LabelOperator.IN, LabelOperator.NOT_IN):
        if tokens.take_if(operator.value):
            return LabelRequirement(key, operator, _parse_values(tokens))
    return LabelRequirement(key, LabelOperator.EXISTS)


def _parse_values(tokens: _Tokens) -> tuple[str, ...]:
    tokens.expect("(")
    values = {tokens.take_value()}
    while tokens.take_if(","):
        values.add(tokens.take_value())
    tokens.expect(")")
    return tuple(sorted(values))


def _describe(token: str) -> str:
    return f"{token!r:.80}" if token else "the end"
