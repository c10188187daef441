"""Policies that learned from J alone: the analysis of their proofs, and what a teacher leaves to learn.

`python -m benchmarks.alone proof runs/prove-digits_shift/proof.json …` prints, for each policy alone, its
paired differences to every rival with 95 % intervals, and whether the hypotheses of `docs/results.md` hold.

`python -m benchmarks.alone policy runs/long --proof runs/prove-digits_shift/proof.json` plays one more policy
on the networks of a proof and compares it with the cohorts there.

`python -m benchmarks.alone fresh --task digits_scale --policy runs/a runs/b --first-network 50000` plays
policies on other networks beside the rivals of the hypotheses, in a third of the time of a proof.

`python -m benchmarks.alone teacher` plays the policies that were taught (`TASK_taught-1`) beside their
teachers, on the networks of those proofs.

`python -m benchmarks.alone values runs/a --task digits_shift` plays the policy of a run beside the plans that
its own action values choose, on training networks: what is lost between the two is lost in the lessons.

`python -m benchmarks.alone left` asks on the table of plans of digits_shift what is left to gain beyond the
best plan of each pattern of crippled blocks: by everything that is drawn about a network, and by a choice in
hindsight."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.plan_table import load_table
from benchmarks.play import EMBEDDED
from benchmarks.table_learners import by_condition
from esper._archive import read_archive
from esper._statistics import Estimate, paired
from esper.leyline import ActionMasks, PolicyObservation, PolicyStep
from esper.proof.compare import LEARNED, Cohorts, ProofConfig, acting
from esper.proof.episodes import Maker, play
from esper.proof.policies import Acting, simple_makers
from esper.runtime.tasks import TaskSpec, draw_condition, get_task_spec
from esper.scripts.process import use_one_core
from esper.simic.agent.plan_values import PlanValues, Sight
from esper.simic.training.evaluation import HELD_OUT, TRAINING
from esper.simic.training.plan_learner import PlanSpace, next_seeds
from esper.simic.training.probe import ProbePolicy, fit_probe, task_schedules
from esper.tamiyo import AlwaysWait, FixedSchedule
from esper.tamiyo.schedules import Schedules
from esper.tamiyo.scripted import ScriptedPolicy, as_step
from esper.tamiyo.shipped import load_policy, newest_checkpoint, shipped_schedules

NETWORKS, FIRST = 384, 30_000
VALUES = "planner.network."
"""Prefix of the action values' tensors in a checkpoint."""
ABOVE_ZERO = {
    "digits_shift": ("static", "random", "heuristic", "fixed_schedule"),
    "digits_impaired": ("static", "random", "heuristic"),
    "digits_scale": ("static", "random", "heuristic"),
    "digits_baseline": ("static", "random", "heuristic"),
}
"""Rivals that every policy of a task must beat: the lower bound of the interval is above 0."""
WITHIN_ONE = {
    "digits_shift": ("probe", "static_final"),
    "digits_impaired": ("fixed_schedule", "static_final"),
    "digits_scale": ("fixed_schedule", "static_final"),
    "digits_baseline": ("fixed_schedule", "static_final"),
}
"""Rivals that every policy must come close to: the lower bound is at least -1.0."""


def in_points(estimate: Estimate) -> str:
    """A difference of J in points of 100."""
    return f"{100 * estimate.value:.1f} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


def verdicts(task: str, rival: str, differences: Sequence[Estimate]) -> str:
    """Whether the hypothesis about this rival holds, for each policy; nothing if there is none."""
    if rival in ABOVE_ZERO[task]:
        held = [estimate.low > 0 for estimate in differences]
        return f"> 0: {_counted(held)}"
    if rival in WITHIN_ONE[task]:
        held = [100 * estimate.low >= -1.0 for estimate in differences]
        return f"≥ −1.0: {_counted(held)}"
    return ""


def _counted(held: Sequence[bool]) -> str:
    return "holds" if all(held) else f"**holds for {sum(held)} of {len(held)}**"


def proof_table(proof: dict[str, Any]) -> str:
    """Rivals and policies of one proof, as Markdown."""
    task, policies = proof["task"], proof["policies"]
    title = f"`{task}`, {proof['settings']['networks']} networks from {proof['settings']['first_network']:,}"
    columns = ("rival", "J of the rival", "J − rival, all policies", *policies, "hypothesis")
    lines = [title, "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for rival, difference in proof["learned_minus"].items():
        each = [Estimate(**own["mean"]) for own in difference["J"]["by_policy"]]
        together = in_points(Estimate(**difference["J"]["mean"]))
        cells = [
            f"`{rival}`",
            in_points(Estimate(**proof["cohorts"][rival]["J"]["mean"])),
            together,
            *(in_points(own) for own in each),
            verdicts(task, rival, each),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines.append(f"| `{LEARNED}` | {in_points(Estimate(**proof['cohorts'][LEARNED]['J']['mean']))} |")
    return "\n".join(lines)


def policy_table(name: str, proof: dict[str, Any]) -> str:
    """Paired differences between one more policy and the cohorts of a proof, as Markdown."""
    task, settings = get_task_spec(proof["task"]), proof["settings"]
    config = ProofConfig(networks=settings["networks"], first_network=settings["first_network"])
    cohorts = Cohorts(task, config, lambda *_: lambda _: None)
    cohorts.add(LEARNED, acting(task, load_policy(name), config))
    (ours,) = cohorts.values(LEARNED, "J")
    lines = [f"| cohort of the proof | {name}, J {100 * ours.mean():.1f}, minus it |", "|---|---|"]
    for cohort, strata in proof["episodes"].items():
        theirs = np.array([[one["outcome"]["objective"] for one in stratum] for stratum in strata])
        lines.append(f"| `{cohort}` | {in_points(paired(ours, theirs.mean(0)))} |")
    return "\n".join(lines)


def schedule_of(schedules: Schedules) -> Maker:
    """The best schedule for all networks."""
    return lambda networks: FixedSchedule([schedules.best.schedule] * len(networks))


def probe_of(cohorts: Cohorts, schedules: Schedules) -> Maker:
    """The best schedule for the pattern of crippled blocks that a linear probe predicts."""
    probe = fit_probe(cohorts.task, cohorts.config.probe_networks, root_seed=schedules.root_seed)
    by_pattern = {pattern: result.schedule for pattern, result in schedules.by_pattern.items()}
    return lambda _: ProbePolicy(probe, by_pattern)


def fresh_table(name: str, policies: Sequence[str], networks: int, first: int) -> str:
    """Policies of a task on networks that no proof has used, as Markdown."""
    task, config = get_task_spec(name), ProofConfig(networks=networks, first_network=first)
    cohorts = Cohorts(task, config, lambda *_: lambda _: None)
    schedules, simple = task_schedules(task, shipped_schedules(task.name)), simple_makers(task, HELD_OUT)
    rivals = {rival: simple[rival] for rival in ("static", "random", "heuristic")}
    rivals["fixed_schedule"] = schedule_of(schedules)
    if schedules.by_pattern:
        rivals["probe"] = probe_of(cohorts, schedules)
    for rival, make in rivals.items():
        cohorts.add(rival, make, static=rival == "static")
    loaded = [load_policy(policy) for policy in policies]
    for policy in loaded:
        cohorts.add(LEARNED, acting(task, policy, config))
        cohorts.add("learned_sampled", acting(task, policy, replace(config, sample=True)))
        grown = cohorts.played[LEARNED][-1]
        cohorts.add_grown("static_final", grown, {one.network: one.fossils for one in grown})
    ours = cohorts.values(LEARNED, "J")
    columns = ("rival", "J of the rival", "J − rival, all policies", *policies, "hypothesis")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for rival in (*rivals, "static_final", "learned_sampled"):
        theirs = np.broadcast_to(cohorts.values(rival, "J"), ours.shape)
        each = [paired(own, other) for own, other in zip(ours, theirs, strict=True)]
        together = in_points(paired(ours.T, theirs.T))
        cells = [f"`{rival}`", f"{100 * theirs.mean():.1f}", together, *map(in_points, each)]
        lines.append(f"| {' | '.join(cells)} | {verdicts(name, rival, each)} |")
    seeds = np.mean([len(one.fossils) for stratum in cohorts.played[LEARNED] for one in stratum])
    accuracy, params = (cohorts.values(LEARNED, what).mean() for what in ("test_accuracy", "added_params"))
    summary = (
        f"`{name}`, {networks} networks from {first:,}: J {100 * ours.mean():.1f}, test accuracy "
        f"{accuracy:.1f} %, {params:.0f} added parameters, {seeds:.2f} seeds."
    )
    parts = [*lines, "", summary]
    if task.conditions is not None:
        parts += ["", growth_by_pattern(task, cohorts)]
    return "\n".join(parts)


def growth_by_pattern(task: TaskSpec, cohorts: Cohorts) -> str:
    """What the policies grow, and what they gain over never growing, by the blocks that are crippled."""
    (never,) = cohorts.values("static", "J")
    gains = cohorts.values(LEARNED, "J") - never  # [policies, networks]
    rows: dict[tuple[bool, ...], list[tuple[int, int]]] = {}
    for policy, stratum in enumerate(cohorts.played[LEARNED]):
        for index, one in enumerate(stratum):
            crippled = draw_condition(task, HELD_OUT, 0, one.network).crippled
            rows.setdefault(tuple(crippled), []).append((policy, index))
    columns = ("crippled blocks", "networks", *(f"seed in {slot}" for slot in task.slots), "J − never")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for crippled, places in sorted(rows.items()):
        blocks = " and ".join(str(block + 1) for block, is_crippled in enumerate(crippled) if is_crippled)
        grown = [
            {fossil.slot for fossil in cohorts.played[LEARNED][policy][index].fossils}
            for policy, index in places
        ]
        shares = [f"{100 * np.mean([slot in own for own in grown]):.0f} %" for slot in task.slots]
        gain = 100 * np.mean([gains[policy, index] for policy, index in places])
        cells = (blocks or "none", str(len(places) // len(cohorts.played[LEARNED])), *shares, f"{gain:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


class ByValues(ScriptedPolicy):
    """Chooses a plan at the first decision, by the mean of the action values, and carries it out."""

    def __init__(self, values: PlanValues, task: TaskSpec) -> None:
        self.values, self.space = values, PlanSpace.of(task, slice(0))
        self.plan: Tensor | None = None

    def begin(self, num_envs: int) -> None:
        self.plan = None

    def act(
        self, obs: PolicyObservation, hidden: object, masks: ActionMasks, *, deterministic: bool = False
    ) -> PolicyStep:
        if self.plan is None:
            plans = self.space.plans(obs.slots.shape[1], torch.Generator().manual_seed(0))
            gains = self.values.gains(Sight.of(obs, torch.arange(len(obs.base))), plans)
            self.plan = plans[gains.mean(0).argmax(-1)]
        tempo = torch.full((len(self.plan),), int(self.space.tempo))
        return as_step(next_seeds(self.plan, obs.blueprints, masks, tempo))


def values_of(run: str) -> PlanValues:
    """The action values in the newest checkpoint of a run."""
    tensors, _ = read_archive(newest_checkpoint(run), kind="run")
    own = {name.removeprefix(VALUES): t for name, t in tensors.items() if name.startswith(VALUES)}
    members, inputs, hidden = own["cell_weight"].shape
    base, slot = len(own["base_mean"]), len(own["slot_mean"])
    values = PlanValues(base, slot, inputs - slot - 1, members=members, hidden=hidden, seed=0)
    values.load_state_dict(own)
    return values


def values_rows(name: str, run: str, networks: int, first: int) -> str:
    """J of a policy and of its values, and the difference, with the seeds that each made permanent."""
    task, numbers = get_task_spec(name), range(first, first + networks)
    policy, values = load_policy(run), values_of(run)
    makers: dict[str, Maker] = {
        "never": lambda _: AlwaysWait(),
        "values": lambda _: ByValues(values, task),
        "policy": lambda envs: Acting(policy, envs, task.episode_length, root_seed=TRAINING),
    }
    played = {who: play(task, make, root_seed=TRAINING, networks=numbers) for who, make in makers.items()}
    never, by_values, by_policy = (
        np.array([one.outcome.objective for one in episodes]) for episodes in played.values()
    )
    seeds = {who: np.mean([len(one.fossils) for one in episodes]) for who, episodes in played.items()}
    cells = [
        in_points(paired(by_values, never)),
        in_points(paired(by_policy, never)),
        in_points(paired(by_policy, by_values)),
        f"{seeds['values']:.2f}",
        f"{seeds['policy']:.2f}",
    ]
    return f"| {run} | {' | '.join(cells)} |"


def teacher_schedules(task: str) -> Path:
    """The schedules that the taught policy of a task learned from, if a later search has replaced them; else
    those that ship for the task."""
    former = shipped_schedules(f"{task}_taught")
    return former if former.is_file() else shipped_schedules(task)


def teacher_row(name: str, networks: int, first: int) -> str:
    """J of a taught policy, of its teacher, and the difference."""
    task = get_task_spec(name)
    cohorts = Cohorts(task, ProofConfig(networks=networks, first_network=first), lambda *_: lambda _: None)
    schedules = task_schedules(task, teacher_schedules(name))
    cohorts.add("teacher", probe_of(cohorts, schedules) if schedules.by_pattern else schedule_of(schedules))
    cohorts.add(LEARNED, acting(task, load_policy(f"{name}_taught-1"), cohorts.config))
    taught, teacher = (cohorts.values(cohort, "J")[0] for cohort in (LEARNED, "teacher"))
    cells = [f"{100 * taught.mean():.1f}", f"{100 * teacher.mean():.1f}", in_points(paired(taught, teacher))]
    return f"| `{name}` | {' | '.join(cells)} |"


def left_to_gain(name: str) -> str:
    """What knowledge about a network is worth on the table, each plan chosen in other worlds."""
    table, task = load_table(name), get_task_spec(name)
    worlds = range(table.first_world, table.first_world + table.objective.shape[1])
    drawn = [draw_condition(task, TRAINING, 0, world) for world in worlds]
    labels = {
        "nothing": [() for _ in drawn],
        "crippled blocks": [one.crippled for one in drawn],
        "crippled blocks and size of the training set": [(one.crippled, one.train_size) for one in drawn],
        "all that is drawn": [
            (one.crippled, one.train_size, one.label_noise, one.learning_rate) for one in drawn
        ],
    }
    objective = {what: by_condition(table, _numbered(own)) for what, own in labels.items()}
    objective["its own result, in hindsight"] = table.objective.max(0)
    never, blocks = table.objective[0], objective["crippled blocks"]
    lines = [
        f"{name}: {len(table.plans)} plans, {len(worlds)} worlds; points of J",
        "",
        "| the plan is chosen by | minus never growing | minus the choice by crippled blocks |",
        "|---|---|---|",
    ]
    for what, values in objective.items():
        lines.append(f"| {what} | {in_points(paired(values, never))} | {in_points(paired(values, blocks))} |")
    return "\n".join(lines)


def _numbered(labels: Sequence[Any]) -> np.ndarray:
    kinds = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    return np.array([kinds[label] for label in labels])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.alone",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts = parser.add_subparsers(dest="part", required=True)
    proofs = parts.add_parser("proof", help="tables of proofs")
    proofs.add_argument("files", type=Path, nargs="+", metavar="PROOF.json")
    policies = parts.add_parser("policy", help="one more policy on the networks of a proof")
    policies.add_argument("policy", help="name, file or run of the policy")
    policies.add_argument("--proof", type=Path, required=True, metavar="PROOF.json")
    fresh = parts.add_parser("fresh", help="policies on other networks")
    fresh.add_argument("--task", choices=EMBEDDED, default="digits_shift")
    fresh.add_argument("--policy", nargs="+", required=True)
    fresh.add_argument("--networks", type=int, default=NETWORKS)
    fresh.add_argument("--first-network", type=int, required=True)
    teachers = parts.add_parser("teacher", help="taught policies beside their teachers")
    teachers.add_argument("--tasks", nargs="+", choices=EMBEDDED, default=EMBEDDED)
    teachers.add_argument("--networks", type=int, default=NETWORKS)
    teachers.add_argument("--first-network", type=int, default=FIRST)
    beside = parts.add_parser("values", help="policies beside the action values that taught them")
    beside.add_argument("runs", nargs="+", metavar="RUN")
    beside.add_argument("--task", choices=EMBEDDED, default="digits_shift")
    beside.add_argument("--networks", type=int, default=256)
    beside.add_argument("--first-network", type=int, default=1000)
    left = parts.add_parser("left", help="what is left to gain on a table of plans")
    left.add_argument("task", nargs="?", default="digits_shift")
    given = parser.parse_args(arguments)
    use_one_core()
    if given.part == "proof":
        print("\n\n".join(proof_table(json.loads(file.read_text())) for file in given.files))
    elif given.part == "policy":
        print(policy_table(given.policy, json.loads(given.proof.read_text())))
    elif given.part == "fresh":
        print(fresh_table(given.task, given.policy, given.networks, given.first_network))
    elif given.part == "teacher":
        print("| task | taught | teacher | taught − teacher |\n|---|---|---|---|")
        for name in given.tasks:
            print(teacher_row(name, given.networks, given.first_network), flush=True)
    elif given.part == "values":
        print("| run | values − never | policy − never | policy − values | seeds, values | seeds, policy |")
        print("|---|---|---|---|---|---|")
        for run in given.runs:
            print(values_rows(given.task, run, given.networks, given.first_network), flush=True)
    else:
        print(left_to_gain(given.task))


if __name__ == "__main__":
    main()
