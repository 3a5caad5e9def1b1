"""Which nodes a pod may run on by their labels and taints, with the semantics of Kubernetes.

Sources: Kubernetes documentation, "Assigning Pods to Nodes" and "Taints and Tolerations".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_INTEGER = re.compile(r"[+-]?\d{1,18}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Taint:
    key: str
    value: str = ""
    effect: str = ""

    def __str__(self) -> str:
        return f"{self.key}={self.value}:{self.effect}" if self.value else f"{self.key}:{self.effect}"


@dataclass(frozen=True, slots=True)
class Toleration:
    """A toleration. None or an empty field matches every value, key or effect."""

    key: str = ""
    value: str | None = None
    effect: str = ""

    def tolerates(self, taint: Taint) -> bool:
        return (
            self.key in ("", taint.key)
            and (self.value is None or self.value == taint.value)
            and self.effect in ("", taint.effect)
        )

    def to_manifest(self) -> dict[str, str]:
        operator = {"operator": "Exists"} if self.value is None else {"operator": "Equal", "value": self.value}
        parsed = {"key": self.key, **operator, "effect": self.effect}
        return {name: text for name, text in parsed.items() if text or name == "value"}


@dataclass(frozen=True, slots=True)
class NodeRequirement:
    """A requirement on a label, or on the name of a node if `is_field`. `operator` is one of Kubernetes' six."""

    key: str
    operator: str
    values: tuple[str, ...] = ()
    is_field: bool = False

    def matches(self, name: str, labels: Mapping[str, str]) -> bool:
        value = name if self.is_field else labels.get(self.key)
        match self.operator:
            case "In":
                return value is not None and value in self.values
            case "NotIn":
                return value is None or value not in self.values
            case "Exists":
                return value is not None
            case "DoesNotExist":
                return value is None
            case "Gt" | "Lt":
                return self._compares(value)
        return False

    def _compares(self, value: str | None) -> bool:
        if value is None or not all(_INTEGER.fullmatch(text) for text in (value, *self.values)) or not self.values:
            return False
        return int(value) > int(self.values[0]) if self.operator == "Gt" else int(value) < int(self.values[0])

    def __str__(self) -> str:
        listed = f" ({', '.join(self.values)})" if self.values else ""
        return f"{self.key} {self.operator}{listed}"


NodeTerm = tuple[NodeRequirement, ...]
"""Requirements that a node must meet together. An empty term matches no node."""
NodeTerms = tuple[NodeTerm, ...]
"""Alternatives: a node must match one of the terms. Without terms, every node matches."""


def matches_terms(terms: NodeTerms, name: str, labels: Mapping[str, str]) -> bool:
    if not terms:
        return True
    return any(term and all(each.matches(name, labels) for each in term) for term in terms)


def format_terms(terms: NodeTerms) -> str:
    return " or ".join(" and ".join(map(str, term)) or "nothing" for term in terms)


def parse_terms(selector: Mapping[str, Any]) -> NodeTerms:
    """Parse a NodeSelector, as in the required node affinity of a pod or a volume.

    A selector without terms matches no node.
    """
    terms = tuple(
        (
            *_parse_requirements(term.get("matchExpressions"), is_field=False),
            *_parse_requirements(term.get("matchFields"), is_field=True),
        )
        for term in selector.get("nodeSelectorTerms") or ()
    )
    return terms or ((),)


def _parse_requirements(expressions: Iterable[Mapping[str, Any]] | None, *, is_field: bool) -> NodeTerm:
    return tuple(
        NodeRequirement(
            str(each.get("key") or ""),
            str(each.get("operator") or ""),
            tuple(str(value) for value in each.get("values") or ()),
            is_field,
        )
        for each in expressions or ()
    )


def parse_tolerations(tolerations: Iterable[Mapping[str, Any]] | None) -> tuple[Toleration, ...]:
    """Parse the tolerations of a pod. Without an operator, key and value must be equal."""
    return tuple(
        Toleration(
            str(each.get("key") or ""),
            None if each.get("operator") == "Exists" else str(each.get("value") or ""),
            str(each.get("effect") or ""),
        )
        for each in tolerations or ()
    )
