"""Each rule of the heuristic on a made-up observation, and a real episode through the environment."""
from __future__ import annotations

import pytest
import torch

from env_helpers import make_env, small_task
from esper.leyline import (
    BLUEPRINT_ID_TO_INDEX,
    ActionMasks,
    BlueprintError,
    EsperError,
    LifecycleOp,
    PolicyObservation,
)
from esper.tamiyo.features import BASE_DIM, SLOT_DIM, batch_obs_to_features, stack_inputs
from esper.tamiyo.heuristic import BASE_COLUMN, SLOT_COLUMN, Heuristic, HeuristicConfig

CONFIG = HeuristicConfig(blueprints=("conv_light", "depthwise"))
SETTLED = {"progress": 0.4, "plateau": 0.3, "host_settled": 1.0}


def decide(policy: Heuristic, legal: dict[str, list[int]], *, base: dict[str, float] | None = None,
           slot: dict[str, float] | None = None):
    """One env, two slots; `slot` describes the first, `legal` maps operations to the slots where they are allowed."""
    obs = PolicyObservation(torch.zeros(1, BASE_DIM), torch.zeros(1, 2, SLOT_DIM),
                            torch.tensor([[BLUEPRINT_ID_TO_INDEX["conv_light"], -1]]))
    for name, value in (base or {}).items():
        obs.base[0, BASE_COLUMN[name]] = value
    for name, value in (slot or {}).items():
        bit = name.endswith("?")
        obs.slots[0, 0, SLOT_COLUMN[name.rstrip("?")] + bit] = value
    by_op = torch.zeros(1, 6, 2, dtype=torch.bool)
    by_op[:, LifecycleOp.WAIT] = True
    for op, slots in legal.items():
        by_op[0, LifecycleOp[op], slots] = True
    masks = ActionMasks(by_op.any(2), by_op, torch.ones(1, 13, dtype=torch.bool),
                        *(torch.ones(1, n, dtype=torch.bool) for n in (4, 3, 3, 4, 5)))
    action = policy.act(obs, None, masks).actions[0].tolist()
    return LifecycleOp(action[-1]).name, action[0], action[1]


def test_it_plants_when_the_host_has_settled_and_stands_still() -> None:
    legal = {"GERMINATE": [1]}
    assert decide(Heuristic(CONFIG, 1), legal, base=SETTLED) == ("GERMINATE", 1, BLUEPRINT_ID_TO_INDEX["conv_light"])
    for change in ({"host_settled": 0.0}, {"plateau": 0.2}, {"progress": 0.05}, {"progress": 0.9}):
        assert decide(Heuristic(CONFIG, 1), legal, base=SETTLED | change)[0] == "WAIT", change
    assert decide(Heuristic(CONFIG, 1), {}, base=SETTLED)[0] == "WAIT"
    assert decide(Heuristic(CONFIG, 1), legal, base=SETTLED, slot={"stage_blending": 1.0})[0] == "WAIT"


def test_blueprints_take_turns() -> None:
    policy = Heuristic(CONFIG, 1)
    planted = [decide(policy, {"GERMINATE": [1]}, base=SETTLED)[2] for _ in range(3)]
    assert planted == [BLUEPRINT_ID_TO_INDEX[n] for n in ("conv_light", "depthwise", "conv_light")]


def test_a_pruned_blueprint_is_passed_over() -> None:
    policy = Heuristic(HeuristicConfig(blueprints=("conv_light", "depthwise"), penalty_limit=0.5), 1)
    holding = {"stage_holding": 1.0, "contribution": -0.1, "contribution?": 1.0}
    assert decide(policy, {"PRUNE": [0], "FOSSILIZE": [0]}, slot=holding)[0] == "PRUNE"
    assert decide(policy, {"GERMINATE": [1]}, base=SETTLED)[2] == BLUEPRINT_ID_TO_INDEX["depthwise"]


@pytest.mark.parametrize(("contribution", "wanted"), [(0.1, "FOSSILIZE"), (0.04, "PRUNE"), (-0.2, "PRUNE")])
def test_what_contributes_stays(contribution, wanted) -> None:
    slot = {"stage_holding": 1.0, "contribution": contribution, "contribution?": 1.0}
    assert decide(Heuristic(CONFIG, 1), {"PRUNE": [0], "FOSSILIZE": [0]}, slot=slot) == (wanted, 0, 0)


def test_an_unmeasured_contribution_decides_nothing() -> None:
    slot = {"stage_holding": 1.0, "contribution": 0.0, "contribution?": 0.0}
    assert decide(Heuristic(CONFIG, 1), {"PRUNE": [0], "FOSSILIZE": [0]}, slot=slot)[0] == "WAIT"


def test_seeds_move_on_unless_they_fail() -> None:
    slot = {"stage_training": 1.0, "stage_age": 0.3, "improvement": 0.1}
    legal, failing = {"ADVANCE": [0], "PRUNE": [0]}, {"improvement": -0.3}
    assert decide(Heuristic(CONFIG, 1), legal, slot=slot)[0] == "ADVANCE"
    assert decide(Heuristic(CONFIG, 1), legal, slot=slot | failing)[0] == "PRUNE"
    assert decide(Heuristic(CONFIG, 1), legal, slot=slot | failing | {"stage_age": 0.0})[0] == "ADVANCE"


def test_a_real_episode_is_legal() -> None:
    task = small_task("digits_impaired", epochs=14, steps=6)
    env = make_env(task, 4)
    policy = Heuristic(HeuristicConfig(blueprints=("conv_light",), plateau_epochs=0, min_progress=0.0), 4)
    env.begin_round(0)
    ops = []
    for epoch in range(1, 15):
        env.train_epoch(epoch)
        env.validate(epoch)
        seen = env.sense(epoch)
        inputs = stack_inputs(seen.signals, seen.table, seen.sensors, last_op=[e.last_op for e in env.envs],
                              last_success=[e.last_success for e in env.envs])
        result = env.act(seen, policy.act(batch_obs_to_features(inputs), None, seen.masks).actions.tolist())
        assert all(outcome.executed for outcome in result.outcomes)
        ops += [outcome.spec.op.name for outcome in result.outcomes]
    assert {"GERMINATE", "ADVANCE"} <= set(ops)


def test_bad_input() -> None:
    with pytest.raises(BlueprintError, match="noop"):
        HeuristicConfig(blueprints=("noop",))
    with pytest.raises(EsperError, match="plateau_epochs"):
        HeuristicConfig(plateau_epochs=-1)
    with pytest.raises(EsperError, match="1 envs, this policy was made for 2"):
        decide(Heuristic(CONFIG, 2), {})
