"""ETag and If-Match: a change is made only if what was asked for so far is what its author has read.

What a tag covers stands in scheduler/core/preconditions. A tag that does not fit any more is answered with 412 at once;
one that fits goes along with the command as its basis, and is looked at again when that is obeyed. If-Match compares
strongly (RFC 9110, 13.1.1), so the tag is written as a strong one; as the rest of the body changes under it, answers
that bear it forbid storing (`Cache-Control: no-store`), and no conditional GET is answered by it.
"""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import Header, Response

from api.errors import ProblemError

_TAGS = re.compile(r'(?:W/)?"[\x21\x23-\x7e]*"')

IfMatch = Annotated[
    str,
    Header(
        alias="If-Match",
        max_length=1000,
        description="`ETag` of an earlier answer: nothing is changed, and 412 answered, where it is another one now.",
    ),
]


def put_tag(response: Response, tag: str) -> None:
    response.headers["ETag"] = tag
    response.headers["Cache-Control"] = "no-store"


def require_match(if_match: str, tag: str, what: str) -> str:
    """The basis of the command to send: `tag`, or nothing where `if_match` asks for none.

    Raises:
        ProblemError: 412 where `if_match` names other tags than `tag`. A weak tag matches none.
    """
    if not if_match or if_match.strip() == "*":
        return ""
    if tag not in _TAGS.findall(if_match):
        detail = f"If-Match: {what} has changed since {if_match}, its ETag is {tag} now: read it again, then change it"
        raise ProblemError(412, "changed", detail)
    return tag
