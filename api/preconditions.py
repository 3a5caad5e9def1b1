"""ETag and If-Match: a change is made only if what was asked for so far is what its author has read.

The tag covers what requests can change (a job's spec and intent, a pool's lending policy, a node's shape and cordon, a
queue's quota) and not how things fare, so that a job may train on between reading and changing it. If-Match compares
strongly (RFC 9110, 13.1.1), so the tag is written as a strong one; as the rest of the body changes under it, answers
that bear it forbid storing (`Cache-Control: no-store`), and no conditional GET is answered by it.
"""

from __future__ import annotations

import json
import re
from hashlib import sha256
from typing import Annotated

from fastapi import Header, Response

from api.errors import ProblemError
from scheduler.domain.codec import encode
from scheduler.domain.fleet import Node, Pool
from scheduler.domain.job import Job
from scheduler.domain.job_queue import JobQueue

_TAGS = re.compile(r'(?:W/)?"[\x21\x23-\x7e]*"')

IfMatch = Annotated[
    str,
    Header(
        alias="If-Match",
        max_length=1000,
        description="`ETag` of an earlier answer: nothing is changed, and 412 answered, where it is another one now.",
    ),
]


def job_tag(job: Job) -> str:
    return _tag([job.id, encode(job.spec), job.intent.value])


def pool_tag(pool: Pool) -> str:
    return _tag(encode(pool))


def node_tag(node: Node) -> str:
    return _tag([node.name, node.pool, node.gpu, node.gpus, node.gpu_memory_bytes, node.cordoned, node.draining])


def queue_tag(queue: JobQueue) -> str:
    return _tag(encode(queue))


def put_tag(response: Response, tag: str) -> None:
    response.headers["ETag"] = tag
    response.headers["Cache-Control"] = "no-store"


def require_match(if_match: str, tag: str, what: str) -> None:
    """Raises a 412 problem where `if_match` names other tags than `tag`. A weak tag matches none."""
    if if_match and if_match.strip() != "*" and tag not in _TAGS.findall(if_match):
        detail = f"If-Match: {what} has changed since {if_match}, its ETag is {tag} now: read it again, then change it"
        raise ProblemError(412, "changed", detail)


def _tag(asked: object) -> str:
    text = json.dumps(asked, sort_keys=True)
    return f'"{sha256(text.encode()).hexdigest()[:20]}"'
