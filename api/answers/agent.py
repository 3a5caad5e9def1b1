"""What node agents and workers hear: notices to leave, and an agent's assignment."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from api.answers.plan import PlanView


class NoticeView(TypedDict):
    """`leave` where the job has no place to go on, `replan` where newer workers are due, `checkpoint` where somebody
    asked for one, by the name `request`; at the next step boundary where `step` is null."""

    action: Literal["leave", "replan", "checkpoint"]
    step: int | None
    seconds_left: float | None
    request: NotRequired[str]


class ProgressReplyView(TypedDict):
    notice: NoticeView | None


class AgentRankView(TypedDict):
    rank: int
    local_rank: int
    gpu: int
    env: dict[str, str]


class AssignmentView(TypedDict):
    """The reply to an agent's report.

    `begun`: ranks of `generation` may be started; what they need is there for an agent that has not come to that
    generation. `kill`: why the ranks that it reports have to be killed now, empty where they need not. `done`: the
    job has ended, and `failed` tells how. It asks again after `poll_after_s`.
    """

    generation: int
    begun: bool
    ranks: list[AgentRankView]
    notice: NoticeView | None
    kill: str
    done: bool
    failed: bool
    poll_after_s: float
    world_size: NotRequired[int]
    command: NotRequired[list[str]]
    steps: NotRequired[int]
    checkpoint_dir: NotRequired[str]
    plan: NotRequired[PlanView]
