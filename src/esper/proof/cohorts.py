"""Who is compared: networks that start with what a policy grew, hosts that were given the same size or the
same FLOPs, and two rulers for tasks that cripple blocks. The oracle is told what is crippled; the probe reads
it off an early observation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from esper.kasmina.hosts import CNNHost
from esper.leyline import AlphaAlgorithm, EsperError, SeedStage, objective, stream_seed
from esper.proof.episodes import Fossil, Maker, Played
from esper.runtime.tasks import TaskSpec, draw_condition
from esper.simic.training.vector_env import VectorEnv
from esper.tamiyo import FixedSchedule
from esper.tamiyo.schedules import Pattern, Schedule


def with_fossils(fossils: Mapping[int, Sequence[Fossil]]) -> Callable[[VectorEnv], None]:
    """Prepares fresh networks, by seed: these seeds are there, fossilized at alpha 1, and learn from the
    first epoch."""

    def plant(env: VectorEnv) -> None:
        for member in env.envs:
            mine = fossils[member.env_idx]
            for number, fossil in enumerate(mine):
                member.model.germinate(
                    fossil.slot,
                    fossil.blueprint,
                    algorithm=AlphaAlgorithm[fossil.algorithm],
                    init_seed=stream_seed(
                        env.rules.root_seed, "germination", env.episode, member.env_idx, number
                    ),
                )
            snapshot = member.model.snapshot()
            for seed in snapshot.seeds.values():
                seed["stage"] = int(SeedStage.FOSSILIZED)
                seed["alpha"] |= {"alpha": 1.0, "start": 1.0, "target": 1.0}
            member.model.restore(snapshot)
            member.germinated = member.fossilized = len(mine)
            member.governor.reset()

    return plant


def widened(task: TaskSpec, params: float) -> TaskSpec:
    """The task with the CNN host, at least as wide as its own, whose parameters are nearest to so many."""
    if not isinstance(task.outline, CNNHost):
        raise EsperError(
            f"task {task.name!r} has a {task.topology} host; allowed: cnn, which has a width to change"
        )
    at, best = task.outline.base, task
    while True:
        at += 1
        wider = replace(task, host={**task.host, "base": at})
        if abs(wider.host_params - params) >= abs(best.host_params - params):
            return best
        best = wider


def priced(played: Played, task: TaskSpec) -> Played:
    """An episode of a widened host as one of the task's own: what the host has more counts as added."""
    end, added = played.outcome, played.outcome.host_params - task.host_params
    return replace(
        played,
        outcome=replace(
            end,
            host_params=task.host_params,
            added_params=added,
            objective=objective(
                task.objective,
                committed_accuracy=end.committed_accuracy / 100.0,
                added_params=added,
                host_params=task.host_params,
                wasted_seeds=end.germinated - end.fossilized,
                rollbacks=end.rollbacks,
            ),
        ),
    )


def oracle(task: TaskSpec, by_pattern: Mapping[Pattern, Schedule], root_seed: int) -> Maker:
    """Follows the schedule for the pattern that each seed has drawn."""
    return lambda envs: FixedSchedule(
        [by_pattern[draw_condition(task, root_seed, 0, env).crippled] for env in envs]
    )
