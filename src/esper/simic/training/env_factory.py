"""Creation and reset of environments: populations, views of their rows, governors, trackers and telemetry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from esper.kasmina import GovernedRow, NetworkRow, OptimizerRow
from esper.kasmina.facts import host_facts
from esper.leyline import (
    TEMPO_EPOCHS,
    LifecycleOp,
    PopulationError,
    SlotConfig,
    TelemetryEvent,
    blueprint_index,
    stream_seed,
)
from esper.simic.sensors import Sensor
from esper.simic.telemetry.emitters import apply_slot_telemetry, emit_with_env_context
from esper.simic.training.action_execution import ActionRules
from esper.simic.training.parallel_env_state import EnvGroup, ParallelEnvState
from esper.tamiyo.inputs import Setting
from esper.tamiyo.masks import blueprint_mask
from esper.tamiyo.tracker import SignalTracker
from esper.tolaria import GovernorConfig, TolariaGovernor, create_model

if TYPE_CHECKING:
    from esper.kasmina import MorphogeneticModel
    from esper.nissa import TelemetryHub
    from esper.runtime.tasks import TaskSpec
    from esper.simic.telemetry.telemetry_config import TelemetryConfig


FIRST_LOSS_SCALE = 1024.0
"""Initial loss scale of half precision: low enough that the first steps rarely overflow. It grows later."""


def create_env_group(
    task: TaskSpec,
    env_ids: Sequence[int],
    *,
    population: int,
    device: str,
    root_seed: int,
    governor: GovernorConfig | None = None,
    hub: TelemetryHub | None = None,
    stream: torch.cuda.Stream | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    loss_scaling: bool = False,
    twins: int = 1,
    first_env: int = 0,
    extra_sensors: tuple[Sensor, ...] = (),
) -> EnvGroup:
    """A population on one device with one env in each of its first rows; the other rows are idle. `env_ids`
    are the envs' numbers within the task, and `first_env` is the `env_idx` of number 0. Half precision needs
    `loss_scaling`. `twins` is the number of consecutive envs that share initial weights, data and
    condition."""
    if not 1 <= len(env_ids) <= population:
        raise PopulationError(
            f"{len(env_ids)} envs for a population of {population}; allowed: 1 to {population}"
        )
    model = create_model(task, device, population=population, seeds=[0] * population)
    optimizer = task.build_optimizer(model)
    scaler = torch.amp.GradScaler(
        torch.device(device).type, init_scale=FIRST_LOSS_SCALE, enabled=loss_scaling
    )
    group = EnvGroup(
        model,
        optimizer,
        torch.device(device),
        stream,
        envs=[],
        autocast=autocast,
        scaler=scaler,
        extra_sensors=extra_sensors,
    )
    setting = task_setting(task, model)
    group.envs = [
        create_env_state(
            group,
            row,
            first_env + number,
            task,
            setting=setting,
            number=number,
            world=number // twins,
            governor=governor,
            hub=hub,
        )
        for row, number in enumerate(env_ids)
    ]
    reset_group(group, task, root_seed=root_seed, first_episode=0)
    return group


def create_env_state(
    group: EnvGroup,
    row: int,
    env_idx: int,
    task: TaskSpec,
    *,
    setting: Setting,
    number: int,
    world: int,
    governor: GovernorConfig | None = None,
    hub: TelemetryHub | None = None,
) -> ParallelEnvState:
    """One env: views of its row, a governor and a tracker."""
    network = NetworkRow(group.model, row)
    device = str(group.device)
    return ParallelEnvState(
        model=network,
        host_optimizer=OptimizerRow(group.optimizer, row, host=True),
        seed_optimizer=OptimizerRow(group.optimizer, row, host=False),
        scaler=group.scaler,
        stream=group.stream,
        device=device,
        env_idx=env_idx,
        world=world,
        number=number,
        governor=TolariaGovernor(
            GovernedRow(network, group.optimizer), governor or GovernorConfig(), task.chance_loss
        ),
        signal_tracker=SignalTracker(),
        setting=setting,
        prices=task.objective,
        counterfactuals=task.counterfactuals,
        telemetry=None if hub is None else make_telemetry_callback(hub, env_idx, device),
    )


def reset_group(group: EnvGroup, task: TaskSpec, *, root_seed: int, first_episode: int) -> None:
    """Reset the group's networks for episode `first_episode`, each from its world's random streams."""
    for env in group.envs:
        group.model.reset_row(env.row, stream_seed(root_seed, "init", first_episode, env.world))
        group.optimizer.forget_row(env.row)
        condition = task.prepare_row(
            group.model, group.optimizer, env.row, root_seed=root_seed, episode=first_episode, env=env.world
        )
        env.episode_idx, env.max_epochs, env.done = first_episode, task.episode_length, False
        env.budget_steps, env.flops, env.plan = condition.budget_steps, 0, None
        env.germinated = env.fossilized = env.pruned = env.rollbacks = 0
        env.last_measure, env.coalitions, env.total_reward = None, None, 0.0
        env.last_op, env.last_success = LifecycleOp.WAIT, True
        env.reset_lstm_hidden()
        env.init_accumulators(list(task.slots))
        env.signal_tracker.reset()
        env.governor.reset()
    group.scaler.load_state_dict(
        {**group.scaler.state_dict(), "scale": FIRST_LOSS_SCALE, "_growth_tracker": 0}
    )
    group.base_lr = (group.optimizer.host_lr.clone(), group.optimizer.seed_lr.clone())
    rates = group.base_lr[0].tolist()
    for env in group.envs:
        env.base_learning_rate = env.learning_rate = rates[env.row]
    group.zero_accumulators()


def make_telemetry_callback(hub: TelemetryHub, env_idx: int, device: str) -> Callable[[TelemetryEvent], None]:
    """A callback that emits one env's events to the hub, with the env's context."""
    return partial(emit_with_env_context, hub, env_id=env_idx, device=device)


def configure_slot_telemetry(
    env_state: ParallelEnvState, telemetry: TelemetryConfig, inner_epoch: int, global_epoch: int
) -> None:
    """Set what is recorded of an env's slots from now on. It never changes what is measured."""
    apply_slot_telemetry(env_state.slot_telemetry, telemetry, inner_epoch, global_epoch)


def action_rules(task: TaskSpec, *, root_seed: int, max_seeds: int = 0) -> ActionRules:
    """The rules of a run without a reward; a trainer adds its own with `dataclasses.replace`."""
    offered = frozenset(blueprint_index(name) for name in task.blueprints)
    return ActionRules(
        slot_config=SlotConfig.from_ids(task.slots),
        blueprints=offered,
        blueprint_mask=blueprint_mask(task.blueprints),
        objective=task.objective,
        root_seed=root_seed,
        max_epochs=task.episode_length,
        task=task.name,
        epochs_needed=epochs_needed(task),
        max_seeds=max_seeds,
    )


def epochs_needed(task: TaskSpec) -> tuple[int, ...]:
    """By tempo: epochs from a germination to the decision that makes the seed permanent."""
    strict = not task.gates.permissive
    return tuple(task.pacing.epochs_to_permanence(epochs, strict=strict) for epochs in TEMPO_EPOCHS)


def task_setting(task: TaskSpec, model: MorphogeneticModel) -> Setting:
    """What policies see of a task; `model` is one of its networks."""
    answers = task.val_size * max(task.block, 1)
    facts = host_facts(model, classes=task.num_classes, val_samples=answers)
    offered = blueprint_mask(task.blueprints)
    return Setting(facts, offered, epochs_needed(task), flops_budget=task.budget == "flops")
