"""Algorithms of other libraries on the world that ours learns in: J on held-out networks against env-steps.

`python -m benchmarks.rl_libraries` trains sb3-contrib's MaskablePPO and RecurrentPPO and a TorchRL PPO on
digits_shift with numbered plans, with three random seeds each, once with the library's own settings and once
with settings like ours. Esper's learner is beside them: with its own settings it is the preset `digits_shift`
over all env-steps, action values included; with "ours" it is its PPO alone, on the same plans.

Each curve is a JSON file in --out; a finished one is skipped, so a stopped campaign goes on where it was.
`--algorithm`, `--settings` and `--seeds` choose a part, `--minutes` ends a run early (its curve says so and
is trained anew next time), and `--table` prints what is there and draws it in `curves.svg`.

A point of a curve is judged on the held-out networks 0 to 63, the finished policy on 64 to 319. All figures
are paired with never growing in the same networks. Policies of Esper's learner are kept beside its curves.

Own settings: the defaults of the library, with `sparse` rewards. A default rollout is meant for one env, so
its transitions are divided among ours; it has at least one episode. RecurrentPPO has no masks: its illegal
actions become WAIT. Settings like ours: those of `PPOConfig`, whole episodes, rewards `minimal`, no
discount."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.curves import COLOURS, Line, draw
from esper.gym import GrowthVectorEnv
from esper.nissa import TelemetryHub
from esper.proof.episodes import Maker, play
from esper.proof.policies import Acting
from esper.runtime.tasks import get_task_spec
from esper.scripts.process import use_one_core
from esper.simic.agent.ppo_update import PPOConfig
from esper.simic.training import vectorized
from esper.simic.training.evaluation import HELD_OUT
from esper.simic.training.presets import resolve
from esper.tamiyo import AlwaysWait, RecurrentPolicy

TASK, ENVS = "digits_shift", 64
FINAL = 256
"""Networks that a finished policy is judged on, after those of the curve."""
STEPS, EVERY = 60_000, 7_500
"""Env-steps of a run, and between two evaluations."""
SEEDS = (1, 2, 3)
REFERENCE = "esper, defaults"
"""The entry that all others are compared with."""
CURVES = Path(__file__).parent / "rl_curves"
"""Curves of the runs so far, as JSON."""
Act = Callable[[np.ndarray, np.ndarray, bool], np.ndarray]
"""Actions of a policy, from observations, masks and whether an episode begins."""


@dataclass
class Curve:
    """One run. All figures are points of J above never growing."""

    algorithm: str
    settings: str
    seed: int
    task: str = TASK
    steps: int = STEPS
    every: int = EVERY
    finished: bool = False
    seconds: float = 0.0
    """Processor time, judging included."""
    points: list[tuple[int, float, float]] = field(default_factory=list)
    """(env-steps, mean, half of its 95 % interval)."""
    final: list[float] = field(default_factory=list)
    """Of each network that the finished policy was judged on."""

    @property
    def path(self) -> str:
        return f"{self.algorithm}-{self.settings}-{self.seed}.json"


class Judge:
    """Points of J above never growing in held-out networks, one episode each, without exploration."""

    def __init__(self, first: int, networks: int) -> None:
        self.env = GrowthVectorEnv(TASK, networks, held_out=True, first_network=first, on_illegal="wait")
        self.networks = range(first, first + networks)
        self.never = self._natively(lambda _: AlwaysWait())

    def __call__(self, act: Act | RecurrentPolicy) -> np.ndarray:
        if isinstance(act, RecurrentPolicy):
            return 100 * (self._natively(partial(self._acting, act)) - self.never)
        obs, _ = self.env.reset()
        for epoch in range(self.env.task.episode_length):
            chosen = act(obs, self.env.action_masks(), epoch == 0)
            obs, _, _, _, info = self.env.step(chosen)
        return 100 * (info["objective"]["J"] - self.never)

    def _acting(self, policy: RecurrentPolicy, networks: Sequence[int]) -> Acting:
        return Acting(policy, networks, self.env.task.episode_length, root_seed=HELD_OUT)

    def _natively(self, make: Maker) -> np.ndarray:
        """J in the same networks without the wrapper, which knows no memory."""
        played = play(self.env.task, make, root_seed=HELD_OUT, networks=self.networks)
        return np.array([one.outcome.objective for one in played])


def mean_spread(values: np.ndarray) -> tuple[float, float]:
    """Mean and half of its 95 % interval over networks."""
    return float(values.mean()), float(1.96 * values.std(ddof=1) / math.sqrt(len(values)))


@dataclass(frozen=True, slots=True)
class Judges:
    """Of the points of a curve, and of the finished policy."""

    points: Judge
    final: Judge


class Run:
    """One run in progress: its curve is saved after every point."""

    def __init__(
        self, curve: Curve, out: Path, judges: Judges, *, steps: int, every: int, minutes: float
    ) -> None:
        self.curve, self.out, self.judges, self.steps, self.every = curve, out, judges, steps, every
        self.start, self.limit, self.due = time.process_time(), 60 * minutes, 0

    def in_time(self) -> bool:
        return time.process_time() - self.start < self.limit

    def report(self, env_steps: int, act: Act | RecurrentPolicy, *, last: bool = False) -> None:
        """Judge the policy, if that is due."""
        curve = self.curve
        if env_steps < self.due and not (last and env_steps > curve.points[-1][0]):
            return
        self.due = env_steps + self.every
        mean, spread = mean_spread(self.judges.points(act))
        curve.points.append((env_steps, mean, spread))
        if last and env_steps >= self.steps:
            curve.final = self.judges.final(act).tolist()
            curve.finished = True
        curve.seconds = time.process_time() - self.start
        save(curve, self.out)
        print(f"{curve.path} {env_steps} env-steps J - never {mean:.1f} ± {spread:.1f}", flush=True)


def settings_of(name: str) -> dict[str, Any]:
    """Arguments of the environment."""
    return {"reward": "minimal", "gamma": 1.0} if name == "ours" else {"reward": "sparse"}


def sb3_arguments(settings: str, default_rollout: int, length: int) -> dict[str, Any]:
    """Arguments of a Stable-Baselines3 PPO; what is not named is the library's default."""
    if settings == "defaults":
        return {"n_steps": max(default_rollout // ENVS, length)}
    ours = PPOConfig()
    return {
        "n_steps": length,
        "batch_size": ENVS * length // ours.minibatches,
        "n_epochs": ours.epochs,
        "learning_rate": ours.lr,
        "gamma": ours.gamma,
        "gae_lambda": ours.gae_lambda,
        "clip_range": ours.clip,
        "ent_coef": ours.entropy_coef,
        "vf_coef": ours.value_coef,
        "max_grad_norm": ours.max_grad_norm,
        "target_kl": ours.target_kl,
    }


def learn_sb3(model: Any, act: Act, run: Run) -> None:
    """Train until the env-steps or the time are spent."""
    from stable_baselines3.common.callbacks import BaseCallback

    class Reports(BaseCallback):
        def _on_rollout_start(self) -> None:
            run.report(self.num_timesteps, act)

        def _on_step(self) -> bool:
            return run.in_time()

    model.learn(run.steps, callback=Reports())
    run.report(model.num_timesteps, act, last=True)


def maskable_ppo(settings: str, seed: int, run: Run) -> None:
    from sb3_contrib import MaskablePPO

    from esper.gym import SB3VecEnv

    env = SB3VecEnv(TASK, ENVS, **settings_of(settings))
    arguments = sb3_arguments(settings, 2048, env.env.task.episode_length)
    model = MaskablePPO("MlpPolicy", env, seed=seed, device="cpu", **arguments)

    def act(obs: np.ndarray, masks: np.ndarray, _: bool) -> np.ndarray:
        return model.predict(obs, action_masks=masks, deterministic=True)[0]

    learn_sb3(model, act, run)


def recurrent_ppo(settings: str, seed: int, run: Run) -> None:
    from sb3_contrib import RecurrentPPO

    from esper.gym import SB3VecEnv

    env = SB3VecEnv(TASK, ENVS, on_illegal="wait", **settings_of(settings))
    arguments = sb3_arguments(settings, 128, env.env.task.episode_length)
    model = RecurrentPPO("MlpLstmPolicy", env, seed=seed, device="cpu", **arguments)
    memory: dict[str, Any] = {"state": None}

    def act(obs: np.ndarray, _: np.ndarray, begins: bool) -> np.ndarray:
        state = None if begins else memory["state"]
        starts = np.full(len(obs), begins)
        chosen, memory["state"] = model.predict(obs, state, episode_start=starts, deterministic=True)
        return chosen

    learn_sb3(model, act, run)


def torchrl_ppo(settings: str, seed: int, run: Run) -> None:
    """PPO as TorchRL's tutorial puts its parts together: ClipPPOLoss, GAE, Adam, one episode per rollout. Its
    own settings are the defaults of those classes, the tutorial's learning rate, 10 epochs and minibatches
    of 64."""
    from tensordict.nn import TensorDictModule
    from torchrl.modules import MLP, MaskedCategorical, ProbabilisticActor, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    from esper.gym import make_torchrl_env

    ours = PPOConfig()
    like_ours = settings == "ours"
    torch.manual_seed(seed)
    env = make_torchrl_env(TASK, ENVS, **settings_of(settings))
    env.set_seed(seed)
    length, columns = env.growth.task.episode_length, env.observation_spec["observation"].shape[-1]
    head = MLP(columns, env.action_spec.n, num_cells=[64, 64], activation_class=torch.nn.Tanh)
    actor = ProbabilisticActor(
        TensorDictModule(head, ["observation"], ["logits"]),
        in_keys={"logits": "logits", "mask": "action_mask"},
        distribution_class=MaskedCategorical,
        return_log_prob=True,
    )
    critic = ValueOperator(
        MLP(columns, 1, num_cells=[64, 64], activation_class=torch.nn.Tanh), ["observation"]
    )
    gae = GAE(
        gamma=ours.gamma if like_ours else 0.99,
        lmbda=ours.gae_lambda if like_ours else 0.95,
        value_network=critic,
        average_gae=True,
    )
    changes = {"clip_epsilon": ours.clip, "entropy_coeff": ours.entropy_coef} if like_ours else {}
    loss = ClipPPOLoss(actor, critic, **changes)
    optimizer = torch.optim.Adam(loss.parameters(), ours.lr if like_ours else 3e-4)
    epochs = ours.epochs if like_ours else 10
    size = ENVS * length // ours.minibatches if like_ours else 64

    def act(obs: np.ndarray, masks: np.ndarray, _: bool) -> np.ndarray:
        with torch.no_grad():
            logits = head(torch.from_numpy(obs)).masked_fill(~torch.from_numpy(masks), -math.inf)
        return logits.argmax(-1).numpy()

    done = 0
    while done < run.steps and run.in_time():
        run.report(done, act)
        with torch.no_grad():
            batch = env.rollout(length, actor)
        done += batch.numel()
        for _ in range(epochs):
            with torch.no_grad():
                gae(batch)
            flat = batch.reshape(-1)
            for rows in torch.randperm(len(flat)).split(size):
                parts = loss(flat[rows])
                total = parts["loss_objective"] + parts["loss_critic"] + parts["loss_entropy"]
                optimizer.zero_grad()
                total.backward()
                torch.nn.utils.clip_grad_norm_(loss.parameters(), ours.max_grad_norm)
                optimizer.step()
    run.report(done, act, last=True)


def esper_learner(settings: str, seed: int, run: Run) -> None:
    task = get_task_spec(TASK)
    rounds = -(-run.steps // (ENVS * task.episode_length))
    config, _ = resolve("digits_shift" if settings == "defaults" else None)
    config = config.replace(task=TASK, envs=ENVS, rounds=rounds, seed=seed, checkpoint_every=0)
    if settings == "defaults":
        config = config.replace(values_rounds=max(rounds - 2, 1))
    else:
        config = config.replace(granularity="plans")
    task = vectorized.resolve_task(config, task)
    with vectorized.open_trainer(config, task, TelemetryHub()) as trainer:
        for end in range(1, rounds + 1):
            done = (end - 1) * ENVS * task.episode_length
            if not run.in_time():
                break
            run.report(done, trainer.agent.policy)
            trainer.run(until=end)
        done = trainer.progress.round_idx * ENVS * task.episode_length
        run.report(done, trainer.agent.policy, last=True)
        trainer.agent.policy.save((run.out / run.curve.path).with_suffix(".safetensors"))


ALGORITHMS: dict[str, Callable[[str, int, Run], None]] = {
    "esper": esper_learner,
    "maskable_ppo": maskable_ppo,
    "recurrent_ppo": recurrent_ppo,
    "torchrl_ppo": torchrl_ppo,
}


def save(curve: Curve, out: Path) -> None:
    part = out / f".{curve.path}"
    part.write_text(json.dumps(asdict(curve), indent=1) + "\n")
    part.replace(out / curve.path)


def load(out: Path) -> dict[str, Curve]:
    """Every saved curve, by file name."""
    files = sorted(out.glob("*.json"))
    return {file.name: Curve(**json.loads(file.read_text())) for file in files}


def by_entry(curves: Iterable[Curve]) -> dict[str, list[Curve]]:
    """The finished curves of each algorithm and settings, one per random seed."""
    entries: dict[str, list[Curve]] = {}
    for curve in curves:
        if curve.finished:
            entries.setdefault(f"{curve.algorithm}, {curve.settings}", []).append(curve)
    return entries


def table(curves: Sequence[Curve]) -> str:
    """The finished policies of each algorithm, as Markdown: mean of the random seeds, each alone, and how far
    the presets' learner is ahead in the same networks."""
    columns = ("algorithm, settings", "env-steps", "J − never, mean", "each random seed")
    columns += (f"{REFERENCE} − this", "CPU minutes a run")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    entries = by_entry(curves)
    means = {name: np.mean([run.final for run in runs], axis=0) for name, runs in entries.items()}
    for name, runs in entries.items():
        each = "; ".join(shown(mean_spread(np.array(run.final))) for run in runs)
        is_compared = name != REFERENCE and REFERENCE in means
        ahead = shown(mean_spread(means[REFERENCE] - means[name])) if is_compared else ""
        cells = [name, f"{runs[0].points[-1][0]:,}", shown(mean_spread(means[name])), each, ahead]
        cells.append(f"{np.mean([run.seconds for run in runs]) / 60:.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def shown(figure: tuple[float, float]) -> str:
    return f"{figure[0]:.1f} ± {figure[1]:.1f}"


def drawing(curves: Sequence[Curve]) -> str:
    """Mean curves of each algorithm, with a band of one standard error over its random seeds, as SVG."""
    lines = {}
    for name, runs in by_entry(curves).items():
        values = np.array([[mean for _, mean, _ in run.points] for run in runs])
        lines[name] = Line([steps for steps, _, _ in runs[0].points], values)
    return draw(
        f"{TASK}: J above never growing, points; 64 held-out networks, a line per learner", lines, COLOURS[3:]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rl_libraries", description=__doc__)
    parser.add_argument("--algorithm", choices=sorted(ALGORITHMS), nargs="+", default=sorted(ALGORITHMS))
    parser.add_argument("--settings", choices=("defaults", "ours"), nargs="+", default=("defaults", "ours"))
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--steps", type=int, default=STEPS, help="env-steps of each run")
    parser.add_argument("--every", type=int, default=EVERY, help="env-steps between two evaluations")
    parser.add_argument("--minutes", type=float, default=math.inf, help="end each run after this time")
    parser.add_argument("--out", type=Path, default=CURVES, help="directory of the curves")
    parser.add_argument("--table", action="store_true", help="print what is there, train nothing")
    given = parser.parse_args(arguments)
    use_one_core()
    given.out.mkdir(parents=True, exist_ok=True)
    if not given.table:
        judges = Judges(Judge(0, ENVS), Judge(ENVS, FINAL))
        for algorithm in given.algorithm:
            for settings in given.settings:
                for seed in given.seeds:
                    curve = Curve(algorithm, settings, seed, steps=given.steps, every=given.every)
                    known = load(given.out).get(curve.path)
                    if known is not None and (known.steps, known.every) != (given.steps, given.every):
                        raise SystemExit(
                            f"{given.out / curve.path} has --steps {known.steps} --every {known.every}, not "
                            f"{given.steps} and {given.every}; choose another --out"
                        )
                    if known is None or not known.finished:
                        run = Run(
                            curve,
                            given.out,
                            judges,
                            steps=given.steps,
                            every=given.every,
                            minutes=given.minutes,
                        )
                        ALGORITHMS[algorithm](settings, seed, run)
    curves = list(load(given.out).values())
    print(table(curves))
    if by_entry(curves):
        (given.out / "curves.svg").write_text(drawing(curves))


if __name__ == "__main__":
    main()
