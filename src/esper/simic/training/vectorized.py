"""`train_ppo_vectorized`: the public entry point. It builds a run from a configuration, trains and returns
the result. Collaborators are looked up in this module when a run is built, so that they can be replaced."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.amp as torch_amp

from esper.leyline import EsperError, PolicyProtocol, SlotConfig, allowed, stream_seed
from esper.nissa import RunDirectory, TelemetryError, TelemetryHub, get_hub
from esper.runtime.data import SharedBatchIterator, load_dataset, validation_split
from esper.simic.agent.normalization import RewardNormalizer
from esper.simic.agent.plan_values import PlanValueLearner
from esper.simic.agent.ppo import PPOAgent
from esper.simic.contracts import BatchSummary
from esper.simic.ranks import Ranks, current
from esper.simic.rewards import RewardEngine
from esper.simic.seed_management import calculate_entropy_anneal_steps
from esper.simic.sensors import registered_sensors
from esper.simic.telemetry.debug_telemetry import check_numerical_stability
from esper.simic.telemetry.gradient_collector import collect_per_layer_gradients
from esper.simic.training.action_execution import ActionRules
from esper.simic.training.checkpoint import (
    Checkpoint,
    CheckpointStore,
    open_checkpoint,
    restore,
    start_over,
)
from esper.simic.training.config import TrainingConfig
from esper.simic.training.env_factory import action_rules, create_env_group
from esper.simic.training.granularity import check_tasks, close
from esper.simic.training.plan_learner import PlanLearner, PlanSpace
from esper.simic.training.probe import schedule_teacher, task_schedules
from esper.simic.training.recording import RunRecorder
from esper.simic.training.sharded_envs import RelayHub, ShardedEnvs, own_envs, own_populations
from esper.simic.training.task_envs import Roster, TaskEnvs, TaskPolicies
from esper.simic.training.vector_env import VectorEnv
from esper.simic.training.vectorized_trainer import RunContext, VectorizedPPOTrainer
from esper.tamiyo.columns import columns, width
from esper.tamiyo.features import BASE, QUOTE, SLOT, schema
from esper.tamiyo.heuristic import Heuristic
from esper.tamiyo.network import TamiyoNetwork
from esper.tamiyo.policy import RecurrentPolicy
from esper.tamiyo.scripted import AlwaysWait, RandomValid
from esper.tamiyo.shipped import shipped_schedules
from esper.tolaria import validate_device

if TYPE_CHECKING:
    from esper.runtime.tasks import TaskSpec

AMP_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

_stop = threading.Event()


def request_stop() -> None:
    """Ask the run of this process to stop at the end of its current epoch; safe in a signal handler."""
    _stop.set()


def stop_requested() -> bool:
    return _stop.is_set()


def clear_stop() -> None:
    """Clear a request after the run has stopped."""
    _stop.clear()


def train_ppo_vectorized(**fields: Any) -> tuple[PPOAgent | None, list[BatchSummary]]:
    """Train as `TrainingConfig(**fields)` says. Returns the agent (None where the policy does not learn) and
    one summary per round. A caller with a config writes
    `train_ppo_vectorized(**config.to_train_kwargs())`."""
    config = TrainingConfig(**fields)
    from esper.runtime.tasks import get_task_spec

    tasks = resolve_tasks(config, [get_task_spec(name) for name in config.tasks])
    try:
        with open_trainer(config, tasks, get_hub()) as trainer:
            return trainer.run()
    finally:
        clear_stop()


def resolve_tasks(config: TrainingConfig, tasks: Sequence[TaskSpec]) -> list[TaskSpec]:
    """The tasks with the changes that the config makes."""
    resolved = [resolve_task(config, task) for task in tasks]
    names = [task.name for task in resolved]
    if len(set(names)) < len(names):
        raise EsperError(f"config: task names {', '.join(names)}; name each task once")
    longest = max(task.episode_length for task in resolved)
    if config.rollout_length is not None and config.rollout_length > longest:
        raise EsperError(
            f"config: rollout_length {config.rollout_length} exceeds the longest episode_length {longest}"
        )
    return resolved


def resolve_task(config: TrainingConfig, task: TaskSpec) -> TaskSpec:
    """One task with the changes that the config makes."""
    sizes = ("episode_length", "batch_size", "steps_per_epoch", "val_size", "population")
    changes: dict[str, Any] = {name: value for name in sizes if (value := getattr(config, name)) is not None}
    if config.slots is not None:
        changes["slots"] = SlotConfig.from_ids(config.slots).slot_ids
    if config.permissive_gates is not None:
        changes["gates"] = replace(task.gates, permissive=config.permissive_gates)
    if config.auto_forward_gates is not None:
        changes["pacing"] = replace(task.pacing, auto_forward_gates=frozenset(config.auto_forward_gates))
    if task.budget == "flops" and config.episode_length is not None:
        raise EsperError(
            f"config: episode_length {config.episode_length} with task {task.name}, whose episodes end when "
            "their FLOPs are spent; another budget is part of its name: "
            f"{task.name.partition(':')[0]}:budget_steps=NUMBER"
        )
    task = replace(task, incubation=config.incubation, **changes)
    if changes:
        task.check_memory()
    if config.amp == "fp16" and task.population != 1:
        raise EsperError(
            f"config: amp fp16 with population {task.population} of task {task.name}: one loss scale cannot "
            "serve several networks; allowed: population 1, or amp bf16"
        )
    if task.population != 1 and task.population % config.twins:
        raise EsperError(
            f"config: twins {config.twins} with population {task.population} of task {task.name}: twins "
            "share a population, so its size must be a multiple of their number, or 1"
        )
    return task


@contextmanager
def open_trainer(
    config: TrainingConfig, task: TaskSpec | Sequence[TaskSpec], hub: TelemetryHub
) -> Iterator[VectorizedPPOTrainer]:
    """A trainer of one or several tasks whose run directory, if it has one, is attached to the hub; resumed
    if the config says so."""
    ranks = current()
    directory = None if config.telemetry_dir is None else Path(config.telemetry_dir)
    tasks = list(task) if isinstance(task, Sequence) else [task]
    checkpoint = None if config.resume is None else _shared_checkpoint(config, directory, tasks, ranks)
    trainer = build_trainer(config, tasks, hub, checkpoint)
    if checkpoint is not None:
        restore(trainer, checkpoint)  # before the run directory is touched
    with ExitStack() as cleanup:
        if ranks.is_first:
            _begin_records(trainer, checkpoint, directory, cleanup)
        try:
            yield trainer
        except Exception as error:
            if not trainer.ended:
                with suppress(TelemetryError):  # the first error is the one to report
                    trainer.end_run("failed", f"{type(error).__name__}: {error}")
            raise


def _shared_checkpoint(
    config: TrainingConfig, directory: Path | None, tasks: Sequence[TaskSpec], ranks: Ranks
) -> Checkpoint | None:
    """The checkpoint that the config names, with the networks of this rank. The first rank reads it; the
    other machines need no access to its files."""
    parts: list[Checkpoint | None] = []
    if ranks.is_first:
        whole = open_checkpoint(config, directory)
        parts = [
            whole and whole.part(own_envs(tasks, config.envs, rank, ranks.size)) for rank in range(ranks.size)
        ]
    return ranks.scatter(parts, "checkpoint")


def _begin_records(
    trainer: VectorizedPPOTrainer, checkpoint: Checkpoint | None, directory: Path | None, cleanup: ExitStack
) -> None:
    """Attach the run directory to the hub, and make it fit the state of the trainer."""
    hub, store, detector = trainer.recorder.hub, trainer.context.store, trainer.recorder.detector
    if directory is not None:
        run = _open_directory(trainer.config, directory, checkpoint)
        detector.replay(run.events())
        cleanup.enter_context(hub.attached(*run.outputs()))
    cleanup.enter_context(hub.attached(detector))
    if checkpoint is None:
        trainer.recorder.begin_run(trainer.env)
    elif store is not None:
        store.go_back_to(checkpoint, trainer.best)
        header = checkpoint.header
        if header.announced and hub.next_seq == header.seq:
            store.complete(trainer, checkpoint.path, announce=True)


def _open_directory(config: TrainingConfig, directory: Path, checkpoint: Checkpoint | None) -> RunDirectory:
    if checkpoint is not None:
        return RunDirectory.resume(directory, checkpoint.header.seq, checkpoint.header.finished)
    if config.resume is not None:
        return start_over(config, directory)
    return RunDirectory.create(directory, config=config.to_json())


def build_trainer(
    config: TrainingConfig,
    tasks: Sequence[TaskSpec],
    hub: TelemetryHub,
    stored: Checkpoint | None = None,
) -> VectorizedPPOTrainer:
    """A trainer with the networks, data, policy, rewards and recorder of one run."""
    ranks = current()
    devices = [str(validate_device(device, require_index=True)) for device in config.devices]
    check_tasks(config.granularity, config.values_rounds, tasks)
    rewards = [build_rewards(config, task, i * config.envs) for i, task in enumerate(tasks)]
    relay = RelayHub(hub, ranks) if ranks.size > 1 else None
    env = build_envs(config, tasks, relay or hub, devices, rewards)
    agent = build_agent(config, env, devices[0], stored) if config.policy == "ppo" else None
    recorder = RunRecorder(
        hub,
        config,
        collect_per_layer_gradients=collect_per_layer_gradients,
        check_numerical_stability=check_numerical_stability,
        relay=relay,
        ranks=ranks,
    )
    store = None
    if config.telemetry_dir is not None:
        store = CheckpointStore(Path(config.telemetry_dir) / "checkpoints", config.keep_last)
    return VectorizedPPOTrainer(
        RunContext(
            config=config,
            env=env,
            agent=agent,
            policy=agent.policy if agent is not None else build_policies(config, env),
            teacher=build_teachers(config, env),
            planner=None if agent is None else build_planner(config, env, agent),
            rewards=rewards,
            normalizer=RewardNormalizer() if config.normalize_rewards else Unscaled(),
            recorder=recorder,
            store=store,
            stop=partial(_stop_anywhere, ranks),
            ranks=ranks,
        )
    )


def _stop_anywhere(ranks: Ranks) -> bool:
    return ranks.any(stop_requested(), "request to stop")


class Unscaled(RewardNormalizer):
    """A normaliser that leaves rewards unchanged."""

    @property
    def scale(self) -> float:
        return 1.0


def build_rewards(config: TrainingConfig, task: TaskSpec, first_env: int) -> RewardEngine:
    """The rewards of one task, whose envs are numbered from `first_env`."""
    return RewardEngine(
        config.reward,
        task.objective,
        gamma=config.ppo.gamma,
        num_envs=config.envs,
        first_env=first_env,
        family=config.reward_family,
        loss=config.loss_reward,
    )


def build_envs(
    config: TrainingConfig,
    tasks: Sequence[TaskSpec],
    hub: TelemetryHub,
    devices: list[str],
    rewards: Sequence[RewardEngine],
) -> TaskEnvs:
    """The envs of all tasks, or those of them that this rank trains."""
    ranks = current()
    owned = own_populations(tasks, config.envs, ranks.rank, ranks.size)
    parts = [
        build_env(config, task, hub, devices, own, populations)
        for task, own, populations in zip(tasks, rewards, owned, strict=True)
        if populations
    ]
    if ranks.size == 1:
        return TaskEnvs(parts)
    rules = [build_rules(config, task, own) for task, own in zip(tasks, rewards, strict=True)]
    return ShardedEnvs(parts, Roster(tuple(tasks), tuple(rules), (config.envs,) * len(tasks)), ranks)


def build_rules(config: TrainingConfig, task: TaskSpec, rewards: RewardEngine) -> ActionRules:
    return replace(
        action_rules(task, root_seed=config.seed, max_seeds=config.max_seeds),
        reward=rewards,
        rollback_reward=rewards.rollback,
    )


def build_env(
    config: TrainingConfig,
    task: TaskSpec,
    hub: TelemetryHub,
    devices: list[str],
    rewards: RewardEngine,
    populations: Sequence[int] | None = None,
) -> VectorEnv:
    """Populations of one task, by number (None: all), distributed over the devices in turn with one stream
    each, and their batches. The envs have the numbers of those that `rewards` pays.

    Every population has the task's width, whatever the number of envs: env i is always row i % width of
    population i // width. Rows without an env are trained like the others and cost as much: a step of
    digits_shift takes 13 ms with 64 rows and 2.3 ms with 8 (one core of an AMD EPYC)."""
    sensors = registered_sensors(config.sensors)
    size = task.population
    if populations is None:
        populations = range(-(-config.envs // size))
    ids = [list(range(i * size, min((i + 1) * size, config.envs))) for i in populations]
    places = [devices[i % len(devices)] for i in populations]
    data = load_dataset(task.dataset, config.data_root)
    task.check_data(data)
    split = validation_split(
        data.to(devices[0]) if config.gpu_preload else data,
        task.val_size,
        config.seed,
        block=task.block,
        final_size=task.final_val_size,
    )
    worlds = [[member // config.twins for member in members] for members in ids]
    batches = SharedBatchIterator(
        split,
        worlds,
        task.batch_size,
        steps_per_epoch=task.steps_per_epoch,
        seed=config.seed,
        rows=[size] * len(ids),
        devices=places,
    )
    groups = [
        create_env_group(
            task,
            members,
            population=size,
            device=place,
            root_seed=config.seed,
            governor=config.governor,
            hub=hub,
            stream=torch.cuda.Stream(place) if place.startswith("cuda") else None,
            autocast=autocast_for(config, place),
            loss_scaling=config.amp == "fp16",
            twins=config.twins,
            first_env=rewards.envs[0],
            extra_sensors=sensors,
        )
        for members, place in zip(ids, places, strict=True)
    ]
    return VectorEnv(task, groups, batches, split, build_rules(config, task, rewards))


def autocast_for(config: TrainingConfig, device: str) -> Callable[[], AbstractContextManager[Any]]:
    """Context for forward passes in the configured precision."""
    if config.amp == "off":
        return nullcontext
    return partial(torch_amp.autocast, device.split(":")[0], dtype=AMP_TYPES[config.amp])


def build_agent(
    config: TrainingConfig,
    env: TaskEnvs,
    device: str,
    stored: Checkpoint | None = None,
) -> PPOAgent:
    """A new agent, initialised from the run's random seed, or the agent of a checkpoint."""
    extra = [sensor.feature for sensor in registered_sensors(config.sensors)]
    slot_features = (*SLOT, *extra)
    if stored is not None:
        if stored.header.agent is None:
            raise EsperError(f"{stored.path}: the checkpoint has no agent, but policy is ppo")
        return PPOAgent.from_state(
            stored.agent_tensors,
            stored.header.agent,
            feature_schema=schema(extra),
            device=device,
            origin=stored.path,
        )
    steps = config.rollout_length or env.max_epochs
    updates = max(config.rounds - config.teacher_rounds - config.values_rounds, 0) * config.updates_per_round
    ppo = config.ppo
    if not ppo.anneal_updates:
        rollouts = math.ceil(env.max_epochs / steps)
        anneal = calculate_entropy_anneal_steps(updates, rollouts, 1, config.anneal_fraction)
        ppo = replace(ppo, anneal_updates=anneal)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_seed(config.seed, "policy"))
        network = TamiyoNetwork(
            base_dim=width(BASE),
            slot_dim=width(slot_features),
            quote_dim=width(QUOTE),
            hidden=config.hidden,
            memory_horizon=env.max_epochs,
        )
    network.prefer(config.patience)
    close(network, config.granularity)
    known = [feature.name for feature in (*BASE, *slot_features, *QUOTE)]
    if unknown := [name for name in config.blind if name not in known]:
        raise EsperError(f"config: blind names {', '.join(unknown)}; {allowed(known)}")
    network.mask_inputs(
        *(columns(table, config.blind) for table in (BASE, slot_features, QUOTE)), memory=config.memory
    )
    policy = RecurrentPolicy(network.to(device), feature_schema=schema(extra), families=env.families)
    return PPOAgent(
        policy,
        ppo,
        num_envs=env.num_envs,
        num_steps=steps,
        num_slots=env.num_slots,
        num_blueprints=len(env.parts[0].rules.blueprint_mask),
        seed=config.seed,
        twins=config.twins,
    )


def build_teachers(config: TrainingConfig, env: TaskEnvs) -> PolicyProtocol | None:
    """The policy to imitate first: one for each task."""
    if config.teacher is None:
        return None
    return _for_each_task(env, [build_teacher(config, task) for task in env.roster.tasks])


def build_teacher(config: TrainingConfig, task: TaskSpec) -> PolicyProtocol:
    """The policy to imitate in one task. A probe of the first epoch chooses among schedules."""
    assert config.teacher is not None
    if config.teacher == "heuristic":
        return Heuristic(config.heuristic, config.envs)
    path = shipped_schedules(task.name) if config.teacher == "schedule" else config.teacher
    return schedule_teacher(task, task_schedules(task, path), config.envs)


def build_planner(config: TrainingConfig, env: TaskEnvs, agent: PPOAgent) -> PlanLearner | None:
    """The learner of plans for the first rounds; None without such rounds."""
    if not config.values_rounds:
        return None
    network = agent.policy.network
    sizes = (network.architecture[name] for name in ("base_dim", "slot_dim", "quote_dim"))
    spaces = [
        PlanSpace.of(task, slice(i * config.envs, (i + 1) * config.envs))
        for i, task in enumerate(env.roster.tasks)
    ]
    return PlanLearner(
        PlanValueLearner(config.values, *sizes, seed=config.seed),
        spaces,
        twins=config.twins,
        num_slots=env.num_slots,
        seen=(network.base_sight, network.slot_sight, network.quote_sight),
    )


def build_policies(config: TrainingConfig, env: TaskEnvs) -> PolicyProtocol:
    """A policy that does not learn, for each task."""
    return _for_each_task(env, [build_policy(config) for _ in env.roster.tasks])


def _for_each_task(env: TaskEnvs, policies: list[PolicyProtocol]) -> PolicyProtocol:
    return policies[0] if len(policies) == 1 else TaskPolicies(policies, env)


def build_policy(config: TrainingConfig) -> PolicyProtocol:
    """A policy that does not learn, for the envs of one task."""
    if config.policy == "heuristic":
        return Heuristic(config.heuristic, config.envs)
    if config.policy == "random":
        return RandomValid(config.seed, range(config.envs))
    return AlwaysWait()
