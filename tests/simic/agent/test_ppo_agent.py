"""The agent as a whole: exact repetition, agreement of acting and learning, trust region, guards and
checkpoints."""

from __future__ import annotations

import dataclasses
import json

import pytest
import safetensors.torch
import torch

from esper.leyline import EsperError, StructureError
from esper.simic.agent.ppo import NonFiniteUpdateError, PPOAgent, PPOConfig
from esper.tamiyo.policy import action_uniforms

FEATURES = ""  # the toys' agents name no feature schema


def make(toys, config: PPOConfig | None = None, *, envs: int = 6, delay: int = 7):
    toy = toys.Recall(envs=envs, seed=3, delay=delay, slots=2, free=True)
    return toy, toys.make_agent(toy, config or PPOConfig(epochs=4), seed=5, hidden=32)


def play(
    toy, agent: PPOAgent, episode: int, start: int = 0, stop: int | None = None, *, penalty: bool = True
) -> None:
    """Steps of one rollout: env 1 panics at step 3 with broken sensors, env 2 is cut and restarted, the rest
    plays on.

    The rollout's hidden state is kept by the caller in `agent.carried`.
    """
    uniforms = action_uniforms(agent.seed, episode, range(toy.envs), toy.steps)
    if start == 0:
        agent.carried = agent.initial_hidden()
        agent.begin_rollout(agent.carried)
    for t in range(start, toy.steps if stop is None else stop):
        toy.t = t
        obs, masks = toy.observe()
        reset = torch.full((toy.envs,), t == 0)
        valid = torch.ones(toy.envs, dtype=torch.bool)
        if penalty and t == 3:
            agent.buffer.add_penalty(1, -2.0)
            valid[1] = False
        if penalty and t == 4:
            reset[1] = True
        if t == 5:
            reset[2] = True
            agent.buffer.truncate([(2, 4)], agent.policy.value(obs, agent.carried)[2:3])
        step = agent.act(obs, agent.carried, masks, uniforms=uniforms[:, t], reset=reset)
        if penalty and t == 3:
            obs.base[1] = torch.nan
        agent.record(
            obs,
            masks,
            step,
            reward=toy.reward(step.actions),
            terminal=torch.full((toy.envs,), toy.terminal()),
            reset=reset,
            valid=valid,
        )
        agent.carried = step.hidden


def weights(agent: PPOAgent) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in agent.policy.network.state_dict().items()}


def assert_identical(a: PPOAgent, b: PPOAgent) -> None:
    for (name, x), y in zip(weights(a).items(), weights(b).values(), strict=True):
        assert torch.equal(x, y), name


def test_four_epochs_on_two_identical_agents_are_bit_identical(toys) -> None:
    records, agents = [], []
    for _ in range(2):
        toy, agent = make(toys, PPOConfig(epochs=4))
        metrics = []
        for episode in range(3):
            play(toy, agent, episode)
            metrics.append(agent.update())
        records.append(metrics)
        agents.append(agent)
    assert records[0] == records[1]
    assert records[0][0].optimizer_steps == 16
    assert_identical(*agents)


def test_acting_and_learning_see_the_same_log_probs(toys) -> None:
    toy, agent = make(toys, PPOConfig(minibatches=1))
    for episode in range(3):
        play(toy, agent, episode)
        assert agent.update().log_prob_drift < 1e-5


def test_a_panic_leaves_its_penalty_and_no_broken_gradient(toys) -> None:
    toy, agent = make(toys)
    play(toy, agent, 0)
    batch = agent.buffer.finish()
    assert batch.reward[1, 2] == -2.0
    assert batch.truncated[1, 2]
    assert not batch.valid[1, 3]
    metrics = agent.update()
    assert metrics.skipped_steps == 0
    assert metrics.steps == toy.envs * toy.steps - 1
    assert all(t.isfinite().all() for t in weights(agent).values())


def test_a_step_that_leaves_the_trust_region_is_taken_back(toys) -> None:
    toy, agent = make(toys, PPOConfig(lr=0.3, target_kl=1e-4, minibatches=1, epochs=2))
    play(toy, agent, 0, penalty=False)
    before = weights(agent)
    metrics = agent.update()
    assert metrics.kl_stops == 1
    assert metrics.optimizer_steps == 0
    assert metrics.approx_kl_max > 1.5e-4, "what was taken back is told"
    for name, t in weights(agent).items():
        if not name.startswith("value_"):  # PopArt rescaled the value head
            assert torch.equal(t, before[name]), name


def adam_state(agent: PPOAgent) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in agent.state()[0].items() if name.startswith("adam.")}


@pytest.mark.parametrize("updates", [0, 2])
def test_adam_after_a_kl_stop_equals_adam_before_the_step(toys, updates: int) -> None:
    """Moments and step counts bit for bit, also where Adam had no state yet."""
    toy, agent = make(toys, PPOConfig(lr=1e-4, target_kl=None, minibatches=2))
    for episode in range(updates):
        play(toy, agent, episode, penalty=False)
        agent.update()
    before = adam_state(agent)
    assert bool(before) == (updates > 0)
    agent.config = PPOConfig(lr=0.3, target_kl=1e-4, minibatches=1, epochs=2)
    play(toy, agent, updates, penalty=False)
    metrics = agent.update()
    assert (metrics.kl_stops, metrics.optimizer_steps) == (1, 0)
    after = adam_state(agent)
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name]), name


def test_after_a_kl_stop_the_agent_is_what_the_kept_steps_made_it(toys) -> None:
    """An update that ends at its KL limit equals one that was only given the steps that were kept; so do its
    averages."""
    limited, free = (
        make(toys, PPOConfig(lr=0.003, target_kl=target_kl, minibatches=1, epochs=40))
        for target_kl in (0.005, None)
    )
    play(*limited, 0, penalty=False)
    stopped = limited[1].update()
    assert stopped.kl_stops == 1
    assert stopped.optimizer_steps > 0
    free[1].config = PPOConfig(lr=0.003, target_kl=None, minibatches=1, epochs=stopped.optimizer_steps)
    play(*free, 0, penalty=False)
    complete = free[1].update()
    assert_identical(limited[1], free[1])
    expected = adam_state(free[1])
    for name, tensor in adam_state(limited[1]).items():
        assert torch.equal(tensor, expected[name]), name
    for name in (
        "policy_loss",
        "value_loss",
        "entropy",
        "approx_kl",
        "grad_norm",
        "grad_norm_max",
        "head_kl",
    ):
        assert getattr(stopped, name) == getattr(complete, name), name


def test_a_first_step_beyond_the_limit_is_tried_again_at_half_the_size(toys) -> None:
    """Undone exactly, the same step would otherwise be tried and undone in every update to come."""
    toy, agent = make(toys, PPOConfig(lr=0.1, target_kl=1e-3, minibatches=1, epochs=20))
    play(toy, agent, 0, penalty=False)
    before = weights(agent)
    metrics = agent.update()
    assert metrics.kl_stops == 1
    assert metrics.optimizer_steps > 0
    assert metrics.learning_rate < 0.1
    assert any(not torch.equal(t, before[name]) for name, t in weights(agent).items() if "value" not in name)


@pytest.mark.parametrize(
    ("config", "imitate", "passes"),
    [
        ({"target_kl": 1e9}, False, 3),
        ({"target_kl": None}, False, 2),
        ({"target_kl": 1e9}, True, 2),
    ],
)
def test_only_an_update_with_a_kl_limit_pays_for_it(toys, config, imitate, passes) -> None:
    """One more pass, to check the last step. Imitation has no ratio, so there is nothing to check."""
    toy, agent = make(toys, PPOConfig(minibatches=1, epochs=2, **config))
    play(toy, agent, 0, penalty=False)
    calls = []
    handle = agent.policy.network.register_forward_pre_hook(lambda *_: calls.append(1))
    metrics = agent.update(imitate=imitate)
    handle.remove()
    assert (len(calls), metrics.optimizer_steps) == (passes, 2)


def test_the_learning_rate_follows_its_schedule(toys) -> None:
    toy, agent = make(toys, PPOConfig(lr=1e-3, lr_end=0.0, anneal_updates=4, epochs=1))
    seen = []
    for episode in range(5):
        play(toy, agent, episode, penalty=False)
        seen.append(agent.update().learning_rate)
        assert agent.optimizer.param_groups[0]["lr"] == seen[-1]
    assert seen == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4, 0.0])


@pytest.mark.parametrize("imitation_lr", [None, 2e-3])
def test_imitation_has_a_step_size_of_its_own_and_schedules_wait_for_it(toys, imitation_lr) -> None:
    toy, agent = make(
        toys, PPOConfig(lr=1e-3, lr_end=0.0, anneal_updates=2, epochs=1, imitation_lr=imitation_lr)
    )
    seen = []
    for episode, imitate in enumerate((True, True, False, False, False)):
        play(toy, agent, episode, penalty=False)
        before = {
            name: t.clone()
            for name, t in agent.policy.network.named_parameters()
            if not name.startswith("value_")
        }
        seen.append(agent.update(imitate=imitate).learning_rate)
        after = dict(agent.policy.network.named_parameters())
        assert all(torch.equal(t, after[name]) for name, t in before.items()) is (seen[-1] == 0.0)
    assert seen == pytest.approx([imitation_lr or 1e-3] * 2 + [1e-3, 5e-4, 0.0])


def test_one_env_and_more_minibatches_than_envs(toys) -> None:
    toy = toys.Identity(envs=1, seed=0)
    agent = toys.make_agent(toy, PPOConfig(minibatches=4, epochs=2), seed=0)
    toys.train(toy, agent, updates=1)
    assert agent.updates == 1


class TestNonFinite:
    def test_broken_weights_skip_steps_and_stop_the_training_at_the_third(self, toys) -> None:
        toy, agent = make(toys, PPOConfig(epochs=1, minibatches=1, target_kl=None))
        poisoned = agent.policy.network.op_head[-1].bias
        for expected in (1, 2):
            play(toy, agent, 0, penalty=False)
            poisoned.data[0] = torch.nan
            before = weights(agent)
            metrics = agent.update()
            assert (metrics.skipped_steps, metrics.optimizer_steps) == (1, 0)
            assert agent.skipped_steps == expected
            assert metrics.policy_loss != metrics.policy_loss, "nothing was learned, so nothing was measured"
            assert poisoned.grad is not None
            assert poisoned.grad.isnan().any(), "what was wrong is there to be looked at"
            for name, t in weights(agent).items():
                if not name.startswith("value_"):
                    assert torch.equal(t.nan_to_num(7.0), before[name].nan_to_num(7.0)), name
            poisoned.data[0] = 0.0
        play(toy, agent, 0, penalty=False)
        poisoned.data[0] = torch.nan
        with pytest.raises(NonFiniteUpdateError, match="loss nan"):
            agent.update()

    def test_a_clean_update_forgives(self, toys) -> None:
        toy, agent = make(toys, PPOConfig(epochs=1, minibatches=1))
        agent.skipped_steps = 2
        play(toy, agent, 0)
        agent.update()
        assert agent.skipped_steps == 0

    def test_a_broken_reward_is_named(self, toys) -> None:
        toy, agent = make(toys)
        play(toy, agent, 0)
        agent.buffer.columns["reward"][4, 6] = torch.nan
        with pytest.raises(EsperError, match="env 4, step 6: reward is nan"):
            agent.update()


class TestCheckpoint:
    def test_a_restored_agent_continues_bit_identically(self, toys, tmp_path) -> None:
        toy, agent = make(toys)
        for episode in range(2):
            play(toy, agent, episode)
            agent.update()
        agent.save(tmp_path / "agent")
        again = PPOAgent.load(tmp_path / "agent", feature_schema=FEATURES, config=agent.config)
        twin, _ = make(toys)
        twin.generator.set_state(toy.generator.get_state())
        for episode in range(2, 4):
            play(toy, agent, episode)
            play(twin, again, episode)
            assert agent.update() == again.update()
        assert_identical(agent, again)
        assert (again.updates, again.epsilon) == (agent.updates, agent.epsilon)

    def test_even_in_the_middle_of_a_rollout(self, toys, tmp_path) -> None:
        toy, agent = make(toys)
        play(toy, agent, 0)
        agent.update()
        play(toy, agent, 1, stop=4)
        agent.save(tmp_path / "agent")
        again = PPOAgent.load(tmp_path / "agent", feature_schema=FEATURES)
        again.carried = agent.carried
        twin, _ = make(toys)
        twin.generator.set_state(toy.generator.get_state())
        twin.cue = toy.cue
        play(toy, agent, 1, start=4)
        play(twin, again, 1, start=4)
        assert agent.update() == again.update()
        assert_identical(agent, again)

    def test_other_settings_are_refused_by_name(self, toys, tmp_path) -> None:
        _, agent = make(toys)
        agent.save(tmp_path / "agent")
        with pytest.raises(StructureError, match=r"config.clip is 0.2 in the file and 0.3 here"):
            PPOAgent.load(
                tmp_path / "agent",
                feature_schema=FEATURES,
                config=dataclasses.replace(agent.config, clip=0.3),
            )
        with pytest.raises(StructureError, match="features is '' in the file and 'others' here"):
            PPOAgent.load(tmp_path / "agent", feature_schema="others")
        agent.policy.save(tmp_path / "policy")
        with pytest.raises(StructureError, match="kind is 'policy' in the file and 'agent' here"):
            PPOAgent.load(tmp_path / "policy", feature_schema=FEATURES)

    @pytest.mark.parametrize("missing", ["popart", "updates", "seed", "config"])
    def test_missing_fields_are_named(self, toys, missing: str) -> None:
        tensors, meta = make(toys)[1].state()
        with pytest.raises(StructureError, match=rf"field {missing} is missing"):
            PPOAgent.from_state(
                tensors, {k: v for k, v in meta.items() if k != missing}, feature_schema=FEATURES
            )

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"updates": "7"}, "updates is '7': expected `int`"),
            ({"num_envs": 0}, "num_envs is 0: expected `int` >= 1"),
            ({"config": None}, "config is null"),
            ({"config": {"clip": 0.2}}, r"field config\.gamma is missing"),
            ({"popart": [{"mean": [], "var": 1.0, "count": -1.0, "decay": 1.0}]}, r"count is -1\.0"),
            ({"popart": []}, "popart has 0 statistics, must have 1"),
            ({"schema": [1]}, r"schema is \[1\]"),
            ({"version": 9}, "version is 9, written by a newer Esper"),
            ({"colour": 1}, "field colour is unknown"),
        ],
    )
    def test_wrong_fields_are_named(self, toys, change, message: str) -> None:
        tensors, meta = make(toys)[1].state()
        with pytest.raises(StructureError, match=message):
            PPOAgent.from_state(tensors, meta | change, feature_schema=FEATURES)

    @pytest.mark.parametrize("name", ["network.value_out.bias", "adam.exp_avg.value_out.bias"])
    def test_missing_or_misshapen_tensors_are_named(self, toys, name: str) -> None:
        toy, agent = make(toys)
        play(toy, agent, 0)
        agent.update()
        tensors, meta = agent.state()
        with pytest.raises(StructureError, match=rf"missing tensors \['{name.split('.', 1)[1]}'\]"):
            PPOAgent.from_state(
                {k: v for k, v in tensors.items() if k != name}, meta, feature_schema=FEATURES
            )
        with pytest.raises(StructureError, match=r"value_out.bias has shape \(3,\), wanted \(1,\)"):
            PPOAgent.from_state({**tensors, name: torch.zeros(3)}, meta, feature_schema=FEATURES)
        with pytest.raises(StructureError, match=r"tensor 'else.x' belongs to no part"):
            PPOAgent.from_state({**tensors, "else.x": torch.zeros(3)}, meta, feature_schema=FEATURES)

    def test_the_file_is_plain_safetensors_with_a_json_header(self, toys, tmp_path) -> None:
        toy, agent = make(toys)
        play(toy, agent, 0)
        agent.update()
        agent.save(tmp_path / "agent")
        tensors = safetensors.torch.load_file(tmp_path / "agent")
        assert sum(name.startswith("adam.exp_avg_sq.") for name in tensors) == len(
            list(agent.policy.network.parameters())
        )
        with safetensors.safe_open(tmp_path / "agent", "pt") as file:
            assert json.loads(file.metadata()["esper"])["updates"] == 1
