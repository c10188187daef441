"""The recorded explanation of a decision, against what the environment and the policy say themselves."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from esper.leyline import LIVE_STAGES, OP_NAMES, PRESENT_STAGES, Veto, blueprint_index
from esper.nissa import RunDirectory, TelemetryHub
from esper.runtime.tasks import get_task_spec
from esper.simic.telemetry.decision import KNOWN, observed_names
from esper.simic.training import vectorized
from esper.simic.training.config import TrainingConfig
from esper.simic.training.recording import RunRecorder
from esper.tamiyo.features import BASE_DIM, QUOTE_DIM, SLOT_DIM
from run_helpers import SMALL


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], list[Any], Any]:
    """Rows of table `steps`, what the recorder was given at each step, and the run's first event."""
    path = tmp_path_factory.mktemp("decision") / "run"
    config = TrainingConfig(**SMALL | {"rounds": 1}, max_seeds=2, telemetry_dir=str(path))
    given: list[Any] = []
    step = RunRecorder.step

    def spy(self: RunRecorder, env: Any, seen: Any, chosen: Any, *rest: Any) -> None:
        given.append((env.parts[0].rules, seen.parts[0], seen.obs, chosen))
        step(self, env, seen, chosen, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunRecorder, "step", spy)
        task = vectorized.resolve_task(config, get_task_spec(config.task))
        with vectorized.open_trainer(config, task, TelemetryHub()) as trainer:
            trainer.run()
    run = RunDirectory.open(path)
    start = next(run.events())["data"]
    return run.table("steps").to_pylist(), given, start


def test_observations_are_what_the_policy_was_given(recorded: Any) -> None:
    rows, given, start = recorded
    slots, (names,) = len(start["slots"]), start["observed_by_task"].values()
    offered = [blueprint_index(name) for name in get_task_spec(start["task"]).blueprints]
    assert len(names) == BASE_DIM + slots * (SLOT_DIM + QUOTE_DIM * len(offered))
    assert len(rows) == len(given) * SMALL["envs"]
    for row in rows:
        _, _, obs, _ = given[row["epoch"] - 1]
        env = row["env_id"]
        seen = torch.cat([obs.base[env], obs.slots[env].flatten(), obs.quotes[env][:, offered].flatten()])
        assert row["observation"] == seen.tolist()
        named = dict(zip(names, row["observation"], strict=True))
        assert named["progress"] == pytest.approx(row["epoch"] / SMALL["episode_length"])
        assert named["r0c0 feature_rank"] == pytest.approx(dict(row["sensors"])["r0c0 feature_rank"])


def test_probabilities_of_pairs_are_those_of_the_policy(recorded: Any) -> None:
    rows, given, start = recorded
    for row in rows:
        _, seen, _, step = given[row["epoch"] - 1]
        legal, env, pairs = seen.masks.slot_by_op[row["env_id"]], row["env_id"], dict(row["slot_probs"])
        expected = {
            f"{OP_NAMES[op]} {slot}": float(step.op_probs[env, op] * step.slot_probs[env, op, s])
            for op in range(1, len(OP_NAMES))
            for s, slot in enumerate(start["slots"])
            if legal[op, s]
        }
        assert pairs == pytest.approx(expected, rel=1e-5)
        assert math.fsum(pairs.values()) + dict(row["op_probs"])["WAIT"] == pytest.approx(1, abs=1e-5)


def test_every_illegal_pair_of_an_occupied_slot_has_its_reason(recorded: Any) -> None:
    rows, given, start = recorded
    reasons = set()
    for row in rows:
        rules, seen, _, _ = given[row["epoch"] - 1]
        reports, vetoes = seen.reports[row["env_id"]], dict(row["vetoes"])
        legal = seen.masks.slot_by_op[row["env_id"]]
        for s, slot in enumerate(start["slots"]):
            for op, name in enumerate(OP_NAMES):
                veto = vetoes.get(f"{name} {slot}")
                if slot in reports:
                    # Masks close germination for all slots at once; a report speaks of its own slot.
                    assert (veto is None) == bool(legal[op, s]) or name == "WAIT"
                elif name == "GERMINATE" and not legal[op, s]:
                    present = sum(r.stage in PRESENT_STAGES for r in reports.values())
                    live = sum(r.stage in LIVE_STAGES for r in reports.values())
                    late = SMALL["episode_length"] - row["epoch"] < min(rules.epochs_needed) + live
                    assert veto == (Veto.TOO_MANY_SEEDS if present >= 2 else Veto.TOO_LATE)
                    assert present >= 2 or late
                else:
                    assert veto is None
        reasons |= set(vetoes.values())
    assert {"stage_forbids", "too_late", "slot_occupied"} & reasons


def test_sensors_are_raw_and_single_precision(recorded: Any) -> None:
    rows, given, start = recorded
    for row in rows:
        _, seen, _, _ = given[row["epoch"] - 1]
        for pair, value in row["sensors"]:
            slot, name = pair.split(" ")
            column = start["slots"].index(slot)
            assert value == np.float32(seen.sensors[name][row["env_id"], column])


def test_names_mark_validity_bits() -> None:
    names = observed_names(["a", "b"], ["norm", "conv_light"])
    assert len(set(names)) == len(names)
    for name in names:
        if name.endswith(KNOWN):
            assert name.removesuffix(KNOWN) in names
