"""Training and validation batches of a group of envs. Results stay on the device; each phase ends with one
transfer to the host.

E envs, P rows of a population.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esper.kasmina.optim import Criterion, GradientStats
from esper.leyline import PolicyObservation, ReportArray, TrainingSignals
from esper.simic.sensors import GrowthProbe, SensedLanes, registered_sensors
from esper.simic.training.parallel_env_state import EnvGroup, ParallelEnvState
from esper.tamiyo.features import batch_obs_to_features
from esper.tamiyo.inputs import SENSORS, stack_inputs


def process_train_batch(
    group: EnvGroup,
    inputs: Tensor,
    targets: Tensor,
    criterion: Criterion,
    *,
    last: bool = False,
    sense: bool = False,
) -> None:
    """One optimizer step of every row that trains, on a batch of the rows that the group has gathered. Inputs
    were copied on the default stream; the group's own stream computes. Of an epoch's `last` step the
    gradients are kept. With `sense`, it also measures where growth would help; its result is the same."""
    probe = GrowthProbe(group.extra_sensors) if sense else None
    group.await_transfer()
    with group.on_stream():
        if group.stream is not None:
            inputs.record_stream(group.stream)
            targets.record_stream(group.stream)
        inputs, targets = group.of_lanes(inputs, targets)
        group.optimizer.zero_grad()
        with group.autocast():
            losses = group.model.losses(inputs, targets, criterion, probe=probe)
        scale = group.scaler.get_scale()
        group.scaler.scale(losses.total()).backward()
        group.scaler.step(group.optimizer)
        group.scaler.update()
        answers = targets[: len(losses.outputs)]  # padding comes last
        correct = (losses.outputs.detach().argmax(-1) == answers).flatten(1).sum(1)
        group.add(losses.main.detach(), correct, targets[0].numel())
        if last:
            gradients = collect_gradient_telemetry_for_batch(group)
            sensors = {} if probe is None else _read_sensors(group, probe, gradients.host_norm, scale)
            group.note(sensors, gradients)


def _read_sensors(group: EnvGroup, probe: GrowthProbe, host_norm: Tensor, scale: float) -> dict[str, Tensor]:
    """Sensors of the rows that took the step, [n, S] each."""
    model, lanes = group.model, group.model.training_lanes
    if lanes.rows is None:
        return probe.read(model, host_norm, loss_scale=scale).named()
    sensed = SensedLanes(lanes.count, model.layout, model.slot_config, model.host_params)
    read = probe.read(sensed, host_norm.index_select(0, lanes.rows), loss_scale=scale).named()
    return {name: values[: lanes.count - lanes.padding] for name, values in read.items()}


def process_val_batch(
    group: EnvGroup, inputs: Tensor, targets: Tensor, criterion: Criterion
) -> tuple[Tensor, Tensor]:
    """Mean loss and number of correct answers of every row, [P] each, in eval mode with all blended seeds on.
    `targets` is [P, B, …]."""
    group.await_transfer()
    with group.on_stream(), torch.no_grad(), group.autocast():
        was_training = group.model.training
        outputs = group.model.eval()(inputs)
        group.model.train(was_training)
        return criterion(outputs, targets), (outputs.argmax(-1) == targets).flatten(1).sum(1)


@torch.compiler.disable
def collect_gradient_telemetry_for_batch(group: EnvGroup) -> GradientStats:
    """The last step's gradient norms and health, still on the device."""
    stats = group.optimizer.stats
    assert stats is not None, "gradients are measured by a training step"
    return stats


def finish_training(groups: Sequence[EnvGroup]) -> None:
    """End of the epoch's training: synchronize each stream once, transfer once, then store every env's
    results and gradients."""
    for group in groups:
        group.synchronize()
    tensors: list[Tensor] = []
    for group in groups:
        sensed, measured = group.sensed()
        sums = torch.stack([group.loss_sum, group.correct])
        tensors += [sums, measured.packed(), torch.stack(list(sensed.values())) if sensed else sums[:0]]
    values = to_host(tensors)
    for i, group in enumerate(groups):
        (loss_sum, correct), gradients, sensors = values[3 * i : 3 * i + 3]
        sensed, measured = group.sensed()
        group.model.record_gradients(measured, gradients, rows=[env.row for env in group.active])
        for env in group.active:
            steps = env.planned.steps
            if sensed:  # otherwise the last measurement stands
                env.sensors = {name: rows[env.row] for name, rows in zip(sensed, sensors, strict=True)}
            env.train_loss = loss_sum[env.row] / steps
            env.train_correct = round(correct[env.row])
            env.train_total = steps * (group.samples // group.batches)


def batch_signals_to_features(
    batch_signals: Sequence[TrainingSignals],
    batch_slot_reports: ReportArray,
    env_states: Sequence[ParallelEnvState],
    device: torch.device | str,
) -> PolicyObservation:
    """The policy's observation of envs of one task, from their signals, the stacked reports [E, S], their
    sensors, the facts of their host, their prices and their last actions."""
    sensors = stack_sensors(env_states)
    extra = registered_sensors([name for name in sensors if name not in SENSORS])
    return batch_obs_to_features(
        stack_inputs(
            batch_signals,
            batch_slot_reports,
            sensors,
            setting=env_states[0].setting,
            prices=[env.prices for env in env_states],
            learning_rate=[env.learning_rate for env in env_states],
            last_op=[env.last_op for env in env_states],
            last_success=[env.last_success for env in env_states],
        ),
        device,
        extra=[sensor.feature for sensor in extra],
    )


def stack_sensors(env_states: Sequence[ParallelEnvState]) -> dict[str, npt.NDArray[np.float64]]:
    """Sensors of all envs by name, [E, S] each."""
    return {
        name: np.array([env.sensors[name] for env in env_states], np.float64)
        for name in env_states[0].sensors
    }


def to_host(tensors: Sequence[Tensor]) -> list[Any]:
    """Device tensors as nested lists, in one copy to the host."""
    device = tensors[0].device
    parts = [tensor.detach().to(device, torch.float64).flatten() for tensor in tensors]
    flat = torch.cat(parts).cpu().numpy()
    cuts = np.cumsum([tensor.numel() for tensor in tensors])[:-1]
    return [
        part.reshape(tensor.shape).tolist()
        for part, tensor in zip(np.split(flat, cuts), tensors, strict=True)
    ]
