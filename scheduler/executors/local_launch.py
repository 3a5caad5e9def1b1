"""Starting the ranks of one generation on this machine: what they are told, and their processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from scheduler.domain.job import Job
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.worker_token import issue_token
from scheduler.executors import render
from scheduler.executors.local_agent import AgentRank, Agents
from scheduler.executors.local_records import RunRoot
from scheduler.executors.local_rendezvous import HOST, Rendezvous


class Launcher:
    """`url` is where workers reach the API, `secret` what their tokens are signed with."""

    def __init__(
        self, root: RunRoot, rendezvous: Rendezvous, agents: Agents, *, url: str, secret: bytes | None
    ) -> None:
        self._root = root
        self._rendezvous = rendezvous
        self._agents = agents
        self._url = url
        self._secret = secret

    @property
    def is_ready(self) -> bool:
        """Whether the rendezvous store serves; the first call starts it."""
        return self._rendezvous.port() is not None

    def launch(self, job: Job, desired: Snapshot) -> Iterator[AgentRank]:
        """Have the agents start the ranks of the job's present generation, one each time the caller asks for the next.

        Raises:
            ValueError: the job has no command, or its environment holds what no program can be given.
            OSError: the rendezvous store has ended, or an agent could not be started.
        """
        generation = job.allocation.generation
        folder = self._root.folder(job.id, generation)
        command = render.argv(job.spec.command, python=sys.executable)
        briefing = self._briefing(job)
        for place in render.rank_places(desired.seats_of(job.allocation)):
            yield AgentRank.start(
                place,
                self._agents.of(job.id, place.node),
                generation=generation,
                argv=command,
                env=render.rank_environment(briefing, place, inherited=os.environ),
                log=folder.log_path(place.rank),
                warm=render.can_be_warm(job.spec.command),
            )

    def _briefing(self, job: Job) -> render.Briefing:
        generation = job.allocation.generation
        folder = self._root.folder(job.id, generation)
        port = self._rendezvous.port()
        if port is None:
            raise OSError("the rendezvous store has just ended")
        return render.Briefing(
            job_id=job.id,
            generation=generation,
            world_size=job.allocation.target_gpus,
            steps=job.spec.steps,
            store_host=HOST,
            store_port=port,
            run_root=str(self._root.path),
            run_dir=str(folder.path),
            plan_path=str(folder.plan_path),
            checkpoint_dir=job.spec.checkpoint.dir or str(self._root.checkpoint_dir(job.id)),
            url=self._url,
            token=issue_token(self._secret, job.id, generation) if self._secret else "",
            frozen_layers=job.freezing.layers,
            checkpoint_step=int(job.progress.checkpoint_steps),
            checkpoint_interval_s=job.spec.checkpoint.interval_s,
            checkpoint_keep=job.spec.checkpoint.keep,
            env=job.spec.env,
        )
