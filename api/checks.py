"""Checks of names that only the solver knows: models, GPU models, profiles; and of what a queue takes."""

from __future__ import annotations

from api.errors import conflict, refuse
from api.identity.principal import Role
from api.world import World
from scheduler.core.preconditions import crowding
from scheduler.domain.job import JobSpec
from scheduler.domain.spelling import meant
from scheduler.solver.profiles.shipped import ProfileError, gpu_names, load_gpu, model_names, parse_model


def check_gpu(name: str, *, field: str = "gpu") -> None:
    if name not in gpu_names():
        refuse(field, name, f"one of {', '.join(gpu_names())}{meant(name, gpu_names())}")


def check_model(name: str) -> None:
    if name not in model_names():
        refuse("model", name, f"one of {', '.join(model_names())}{meant(name, model_names())}")


def check_job(spec: JobSpec) -> None:
    """Refuses a job that names a model, a GPU model or a profile that cannot be planned for."""
    if spec.gpu:
        check_gpu(spec.gpu)
    if spec.model:
        check_model(spec.model)
    if spec.profile_json:
        try:
            parse_model(spec.profile_json, spec.sequence_length)
        except ProfileError as wrong:
            refuse("profile", None, str(wrong))


def check_queue(name: str, world: World, *, owner: str, undeclared: str) -> None:
    """Refuses a queue that nobody declared, where some are and `undeclared` is "refuse"; and one more waiting job of a
    user who has as many there as the queue allows."""
    queues = world.snapshot.queues
    if undeclared == "refuse" and queues and name not in queues:
        seen = sorted(each for each in queues if world.principal.may(Role.VIEWER, each))
        refuse("queue", name, f"one of {', '.join(seen)}{meant(name, seen)}" if seen else "one that an admin declared")
    if why := crowding(world.snapshot.jobs, queues.get(name), owner):
        conflict(why)


def gpu_memory_bytes(gpu: str) -> int:
    check_gpu(gpu)
    return load_gpu(gpu).memory_bytes
