"""Train and validation batches of a group of envs. Everything stays on the device; one transfer per phase
brings the numbers home.

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
from esper.simic.sensors import GrowthProbe, registered_sensors
from esper.simic.training.parallel_env_state import EnvGroup, ParallelEnvState
from esper.tamiyo.features import SENSORS, batch_obs_to_features, stack_inputs


def process_train_batch(
    group: EnvGroup, inputs: Tensor, targets: Tensor, criterion: Criterion, *, sense: bool = False
) -> None:
    """One optimizer step of every row. Inputs were copied on the default stream; the group's own does the
    work. With `sense` the step also measures where growth would help, and is no different for it."""
    probe = GrowthProbe(group.extra_sensors) if sense else None
    group.await_transfer()
    with group.on_stream():
        if group.stream is not None:
            inputs.record_stream(group.stream)
            targets.record_stream(group.stream)
        group.optimizer.zero_grad()
        with group.autocast():
            losses = group.model.losses(inputs, targets, criterion, probe=probe)
        scale = group.scaler.get_scale()
        group.scaler.scale(losses.total()).backward()
        group.scaler.step(group.optimizer)
        group.scaler.update()
        group.loss_sum += losses.main.detach()
        group.correct += (losses.outputs.detach().argmax(-1) == targets).flatten(1).sum(1)
        group.batches += 1
        group.samples += targets[0].numel()
        if probe is not None:
            group.sensors = probe.read(
                group.model, collect_gradient_telemetry_for_batch(group).host_norm, loss_scale=scale
            ).named()


def process_val_batch(
    group: EnvGroup, inputs: Tensor, targets: Tensor, criterion: Criterion
) -> tuple[Tensor, Tensor]:
    """Mean loss and number correct of every row, [P] each, in eval mode, all blended seeds on. `targets` [P,
    B, …]."""
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
    """End of the epoch's training: one synchronize per stream, one transfer, then every env's numbers and
    gradients."""
    for group in groups:
        group.synchronize()
    stats = [collect_gradient_telemetry_for_batch(group) for group in groups]
    tallies = to_host(
        [
            tensor
            for group, measured in zip(groups, stats, strict=True)
            for tensor in (
                torch.stack([group.loss_sum, group.correct]),
                measured.packed(),
                torch.stack(list(group.sensed().values())),
            )
        ]
    )
    by_kind = (tallies[::3], tallies[1::3], tallies[2::3])
    for group, measured, numbers, gradients, sensors in zip(groups, stats, *by_kind, strict=True):
        group.model.record_gradients(measured, gradients)
        for env in group.envs:
            env.sensors = {name: rows[env.row] for name, rows in zip(group.sensed(), sensors, strict=True)}
            env.train_loss = numbers[0][env.row] / group.batches
            env.train_correct = round(numbers[1][env.row])
            env.train_total = group.samples


def batch_signals_to_features(
    batch_signals: Sequence[TrainingSignals],
    batch_slot_reports: ReportArray,
    env_states: Sequence[ParallelEnvState],
    device: torch.device | str,
) -> PolicyObservation:
    """What the policy sees of all envs: their signals, the stacked reports [E, S] and each env's sensors and
    last action."""
    sensors = stack_sensors(env_states)
    extra = registered_sensors([name for name in sensors if name not in SENSORS])
    return batch_obs_to_features(
        stack_inputs(
            batch_signals,
            batch_slot_reports,
            sensors,
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
    """Any number of device tensors as nested lists, in one copy."""
    home = tensors[0].device
    flat = torch.cat([tensor.detach().to(home, torch.float64).flatten() for tensor in tensors]).cpu().numpy()
    cuts = np.cumsum([tensor.numel() for tensor in tensors])[:-1]
    return [
        part.reshape(tensor.shape).tolist()
        for part, tensor in zip(np.split(flat, cuts), tensors, strict=True)
    ]
