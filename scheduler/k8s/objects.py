"""What every object at the API server has: a key, a uid, a version. Objects are JSON dicts, never changed in place."""

from __future__ import annotations

from hashlib import sha256
from sys import intern
from typing import Any

LABEL_CHARACTERS = 63
"""Of a DNS label: names of Services, host names, values of labels."""
_DIGITS_MAX = 18

Object = dict[str, Any]
Key = tuple[str, str]
"""(namespace, name); the namespace of cluster-wide kinds is empty."""


def name_of(item: Object) -> str:
    return str(item["metadata"]["name"])


def namespace_of(item: Object) -> str:
    return str(item["metadata"].get("namespace", ""))


def key_of(item: Object) -> Key:
    return namespace_of(item), name_of(item)


def uid_of(item: Object) -> str:
    return str(item["metadata"]["uid"])


def version_of(item: Object) -> int:
    """The resourceVersion as a number. Those of one kind grow with every write, so they can be compared (KEP-5504)."""
    return int(item["metadata"]["resourceVersion"])


def labels_of(item: Object) -> dict[str, str]:
    return item["metadata"].get("labels") or {}


def annotations_of(item: Object) -> dict[str, str]:
    return item["metadata"].get("annotations") or {}


def is_terminating(item: Object) -> bool:
    return "deletionTimestamp" in item["metadata"]


def number_of(text: object, *, otherwise: int = 0) -> int:
    """The whole number that an object says somewhere as text. Anybody may have written it: a text of thousands of
    digits is no number either, where int() would raise."""
    said = str(text)
    return int(said) if said.isascii() and said.isdigit() and len(said) <= _DIGITS_MAX else otherwise


def within(name: str, characters: int) -> str:
    """`name` if it is no longer than that, else its beginning with a digest of the whole."""
    if len(name) <= characters:
        return name
    digest = sha256(name.encode()).hexdigest()[:8]
    return f"{name[: characters - 9].rstrip('-')}-{digest}"


def lean(item: Object) -> Object:
    """A copy to keep: without managedFields, which nobody here reads and which are a third of a pod, and with keys
    that all objects share, because every document that is parsed brings its own."""
    metadata = {key: value for key, value in item["metadata"].items() if key != "managedFields"}
    kept: Object = _with_shared_keys({**item, "metadata": metadata})
    return kept


def _with_shared_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {intern(key): _with_shared_keys(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_shared_keys(each) for each in value]
    return value
