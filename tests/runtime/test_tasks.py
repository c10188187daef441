"""Tasks: each builds what it describes, a wrong field is an error that shows it, conditions are drawn and
applied row by row."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from esper.kasmina import CNNHost, OptimizerConfig, build_host
from esper.leyline import (
    BlueprintError,
    EsperError,
    GateConfig,
    ObjectiveConfig,
    Pacing,
    PopulationError,
    SlotIdError,
    stream_seed,
)
from esper.runtime import (
    Condition,
    ConditionSpace,
    TaskSpec,
    apply_condition,
    draw_condition,
    get_task_spec,
    register_task,
    task_names,
)
from esper.runtime.data import load_dataset, validation_split
from esper.runtime.tasks import TASKS

DOCS = Path(__file__).parents[2] / "docs" / "tasks.md"
EMBEDDED = [name for name in task_names() if name.startswith("digits_")]
SMALL = [name for name in task_names() if name != "tinystories"]


@pytest.fixture
def registry() -> Iterator[dict[str, TaskSpec]]:
    """The registry, left as it was found."""
    before = dict(TASKS)
    yield TASKS
    TASKS.clear()
    TASKS.update(before)


def fresh(task: TaskSpec, rows: int = 8):
    model = task.build_model(rows, [stream_seed(0, "init", 0, row) for row in range(rows)])
    return model, task.build_optimizer(model)


# -- the registry --------------------------------------------------------------------------------------------


def test_names_are_found_in_any_case() -> None:
    assert get_task_spec("Digits_Shift") is get_task_spec("digits_shift")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        EsperError, match=r"'mnist' is unknown.*; allowed: cifar_baseline, .*digits_shift.*tinystories"
    ):
        get_task_spec("mnist")


def test_a_name_is_registered_once(registry: dict[str, TaskSpec]) -> None:
    task = replace(get_task_spec("digits_baseline"), name="mine")
    assert register_task(task) is task
    assert get_task_spec("MINE") is task
    with pytest.raises(EsperError, match="'mine' is already registered"):
        register_task(task)
    with pytest.raises(EsperError, match=r"task 'mime' is unknown \(did you mean mine\?\)"):
        get_task_spec("mime")
    with pytest.raises(EsperError, match="'my task'; allowed: lower-case"):
        register_task(replace(task, name="my task"))
    with pytest.raises(EsperError, match="takes a TaskSpec, not dict"):
        register_task({"name": "other"})


# -- sizes by text -------------------------------------------------------------------------------------------


def test_sizes_of_task_and_host_can_be_changed_by_text() -> None:
    task = get_task_spec("Digits_Shift:base=8,episode_length=12,population=16")
    assert (task.host["base"], task.episode_length, task.population) == (8, 12, 16)
    assert task.name == "digits_shift:base=8,episode_length=12,population=16"
    assert get_task_spec(task.name) == task
    assert get_task_spec("digits_mlp:features=12").host_params > get_task_spec("digits_mlp").host_params


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("digits_shft:base=8", r"'digits_shft' is unknown \(did you mean digits_shift\?\)"),
        ("digits_shift:classes=5", "dataset digits has 10 classes, the host has 5; allowed: 10 or more"),
        ("digits_shift:size=16", r"have shape \(1, 8, 8\), the host takes \(1, 16, 16\)"),
        ("digits_shift:kernel=2", "kernel is 2, must be odd"),
        ("digits_shift:width=2", "'width=2' is not field=number .*; allowed: batch_size, .*base"),
        ("digits_shift:base", "'base' is not field=number"),
        ("digits_shift:base=-1", "'base=-1' is not field=number"),
        ("digits_shift:base=\u0661", "is not field=number"),
        ("digits_shift:base=100000000", r"population of 64 needs about [\d,.]+ GiB .* has [\d.]+ GiB"),
        ("digits_shift:population=80000000", "needs about"),
        ("digits_shift:steps_per_epoch=999999999", "needs about"),
        ("digits_shift:batch_size=999999999", "needs about"),
        ("digits_shift:episode_length=999999999", "needs about"),
        ("sotu:features=400000000", "needs about"),
        ("digits_mlp:features=100000000", "needs about"),
        ("digits_shift:base=9999999999", "base is 9999999999; allowed: at most 1,000,000,000"),
        (f"digits_shift:base={'9' * 5000}", "base is 999999999999999999999999; allowed: at most"),
        ("digits_shift:blocks=101", "blocks is 101; allowed: at most 100"),
        ("sotu:layers=0", "cannot be built"),
        ("digits_mlp:layers=0", "slot 'r0c0' is unknown"),
    ],
)
def test_sizes_that_cannot_be_are_refused_before_anything_is_built(text: str, words: str) -> None:
    with pytest.raises(EsperError, match=words):
        get_task_spec(text)


@pytest.mark.parametrize("name", task_names())
def test_a_population_fits_its_estimate_of_memory(name: str) -> None:
    """The estimate covers at least the optimizer's state and grows with each size."""
    task = get_task_spec(name)
    assert task.memory > 4 * 4 * task.host_params * task.population
    for field in ("batch_size", "steps_per_epoch"):
        assert replace(task, **{field: 2 * getattr(task, field)}).memory > task.memory


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("cifar_baseline", 6418),
        ("cifar_scale", 99922),
        ("cifar_impaired", 77),
        ("cifar_minimal", 164),
        ("cifar_multichannel", 6418),
        ("cifar_postpool", 24346),
        ("cifar_highres", 24346),
        ("cifar_deep_multichannel", 99922),
        ("cifar_deep_impaired", 1140),
        ("tinystories", 30044544),
    ],
)
def test_reference_hosts_have_their_known_size(name: str, params: int) -> None:
    assert get_task_spec(name).host_params == params


@pytest.mark.parametrize("name", SMALL)
def test_every_task_builds_what_it_describes(name: str) -> None:
    task = get_task_spec(name)
    model, optimizer = fresh(task, task.population)
    assert model.host_params == task.host_params
    assert model.slot_config.slot_ids == task.slots
    assert (model.pacing, model.gate_config, optimizer.config) == (task.pacing, task.gates, task.optimizer)
    x = model.host.example_input()
    x = x.repeat(1, task.population, 1, 1) if task.topology == "cnn" else x.expand(task.population, *x.shape)
    assert model(x).shape[-1] == task.num_classes


@pytest.mark.parametrize("name", EMBEDDED)
def test_embedded_tasks_fit_their_data(name: str) -> None:
    task = get_task_spec(name)
    data = load_dataset(task.dataset)
    split = validation_split(data, task.val_size, 0, block=task.block)
    assert data.num_classes == task.num_classes
    if task.topology == "mlp":
        assert data.train_x.shape[1:] == (task.host["inputs"],)
    else:
        assert data.train_x.shape[1:] == (task.host["channels"], task.host["size"], task.host["size"])
    sizes = [] if task.conditions is None else [s for s in task.conditions.train_sizes if s is not None]
    assert max([0, *sizes]) <= len(split.train)
    # A seed planted in the middle of the episode can still be fossilized.
    assert task.episode_length >= 2 * (task.pacing.min_training_epochs + 6)


def test_chance_is_guessing() -> None:
    assert get_task_spec("digits_shift").chance_loss == pytest.approx(math.log(10))
    assert get_task_spec("sotu").chance_loss == pytest.approx(math.log(106))
    assert (get_task_spec("sotu").block, get_task_spec("digits_shift").block) == (64, 0)


def test_learning_rate_falls_along_a_cosine() -> None:
    task = replace(get_task_spec("digits_baseline"), episode_length=11)
    factors = [task.lr_factor(epoch) for epoch in range(1, 12)]
    assert factors[0] == 1.0
    assert factors[5] == pytest.approx(0.55)
    assert factors[-1] == pytest.approx(0.1)
    assert factors == sorted(factors, reverse=True)
    assert replace(task, lr_decay=False).lr_factor(11) == replace(task, episode_length=1).lr_factor(1) == 1.0


# -- what a task refuses -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"name": ""}, EsperError, "name is ''"),
        ({"name": "Big"}, EsperError, "name is 'Big', must be lower case"),
        ({"name": 3}, EsperError, "name is 3, must be a str"),
        ({"host": "cnn"}, EsperError, "host is 'cnn', must be a Mapping"),
        ({"host": {"kind": "rnn"}}, EsperError, "host kind 'rnn' is unknown; allowed: cnn, gpt, mlp"),
        ({"dataset": "digits_flat"}, EsperError, "holds vector data, a host of topology cnn needs image"),
        ({"host": {"kind": "cnn", "depth": 3}}, EsperError, "does not fit a cnn host"),
        ({"host": {"kind": "cnn", "blocks": [3]}}, EsperError, "unhashable"),
        ({"slots": "r0c0"}, EsperError, "slots is 'r0c0', must be a tuple"),
        ({"slots": ()}, SlotIdError, "at least one slot id"),
        ({"slots": ("r0c1", "r0c0")}, SlotIdError, "not in row-major order"),
        (
            {"slots": ("r0c0", "r7c7")},
            SlotIdError,
            "slot 'r7c7' is unknown to this host; allowed: r0c0, r0c1, r1c0, r1c1",
        ),
        ({"dataset": "imagenet"}, EsperError, "dataset 'imagenet' is unknown; allowed: cifar10, digits"),
        ({"batch_size": 0}, EsperError, "batch_size is 0, must be a whole number from 1 up"),
        ({"steps_per_epoch": 1.5}, EsperError, "steps_per_epoch is 1.5"),
        ({"val_size": -1}, EsperError, "val_size is -1"),
        ({"episode_length": True}, EsperError, "episode_length is True"),
        ({"population": "8"}, EsperError, "population is '8'"),
        ({"population": 5}, PopulationError, "population is 5; allowed: 1 or a multiple of 8"),
        ({"optimizer": {"host_lr": 0.1}}, EsperError, "optimizer is .* must be a OptimizerConfig"),
        ({"optimizer": OptimizerConfig(host_lr=0.0)}, EsperError, "host_lr is 0.0, must be above 0"),
        ({"lr_decay": "cosine"}, EsperError, "lr_decay is 'cosine', must be a bool"),
        ({"pacing": None}, EsperError, "pacing is None, must be a Pacing"),
        ({"gates": None}, EsperError, "gates is None, must be a GateConfig"),
        ({"objective": 0.1}, EsperError, "objective is 0.1, must be a ObjectiveConfig"),
        ({"blueprints": ()}, BlueprintError, r"blueprints are \(\)"),
        ({"blueprints": ("noop",)}, BlueprintError, "one or more of attention, bottleneck, conv_1d"),
        ({"blueprints": ("lora",)}, BlueprintError, "lora"),
        ({"blueprints": ("norm", "norm")}, BlueprintError, "each once"),
        ({"conditions": 0.5}, EsperError, "conditions is 0.5"),
        ({"budget": "steps"}, EsperError, "budget is 'steps'; allowed: epochs, flops"),
        ({"budget_steps": 9}, EsperError, "budget_steps is 9.* with a budget of epochs"),
        ({"budget": "flops"}, EsperError, "budget_steps is 0, must be a whole number from 1 up"),
        (
            {
                "host": {"kind": "cnn", "blocks": 2, "kernel": 1, "channels": 1, "size": 8},
                "conditions": ConditionSpace(cripple_probability=0.5),
            },
            EsperError,
            "no kernels beyond a centre tap",
        ),
        (
            {"conditions": ConditionSpace(cripple_probability=0.0, crippled_blocks=(1, 7))},
            EsperError,
            r"crippled_blocks is \(1, 7\); this host has the blocks 0, 1",
        ),
    ],
)
def test_a_wrong_field_is_an_error_that_shows_it(change: dict, error: type[EsperError], message: str) -> None:
    with pytest.raises(error, match=message):
        replace(get_task_spec("digits_baseline"), **change)


def test_errors_name_the_task() -> None:
    with pytest.raises(EsperError, match=r"^task 'digits_baseline': "):
        replace(get_task_spec("digits_baseline"), batch_size=0)


def test_a_blueprint_must_fit_every_slot() -> None:
    gpt = {"kind": "gpt", "features": 6, "heads": 2, "vocabulary": 106, "context": 64}
    with pytest.raises(BlueprintError, match="divisible by 4, the slot has 6"):
        replace(get_task_spec("sotu"), host=gpt)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cripple_probability": 1.5}, r"a share above 1 in .*cripple_probability=1\.5"),
        ({"cripple_probability": -0.1}, "cripple_probability is -0.1"),
        ({"train_sizes": ()}, r"train_sizes is \(\), must be a tuple of one or more values"),
        ({"train_sizes": (0,)}, "train_sizes is 0"),
        ({"train_sizes": (1.5,)}, "train_sizes is 1.5"),
        ({"label_noises": [0.1]}, r"label_noises is \[0.1\], must be a tuple"),
        ({"label_noises": (1.1,)}, r"a share above 1 in .*label_noises=\(1\.1,\)"),
        ({"label_noises": (None,)}, "label_noises is None"),
        ({"learning_rates": (0.0,)}, "learning_rates is 0.0"),
    ],
)
def test_a_wrong_condition_is_an_error_that_shows_it(change: dict, message: str) -> None:
    with pytest.raises(EsperError, match=message):
        ConditionSpace(**{"cripple_probability": 0.5} | change)


# -- conditions ----------------------------------------------------------------------------------------------


def test_conditions_belong_to_their_coordinates() -> None:
    task = get_task_spec("digits_shift")
    assert draw_condition(task, 0, 3, 5) == draw_condition(task, 0, 3, 5)
    drawn = {
        draw_condition(task, root, episode, env)
        for root in range(3)
        for episode in range(4)
        for env in range(8)
    }
    assert len(drawn) > 20


def test_every_value_of_the_space_is_drawn_equally_often() -> None:
    task, count = get_task_spec("digits_shift"), 800
    assert task.conditions is not None
    drawn = [draw_condition(task, 0, 0, env) for env in range(count)]
    for block in range(2):
        assert sum(c.crippled[block] for c in drawn) / count == pytest.approx(
            task.conditions.cripple_probability, abs=0.06
        )
    for values, found in (
        (task.conditions.train_sizes, [c.train_size for c in drawn]),
        (task.conditions.label_noises, [c.label_noise for c in drawn]),
        (task.conditions.learning_rates, [c.learning_rate for c in drawn]),
    ):
        assert set(found) == set(values)
        for value in values:
            assert found.count(value) / count == pytest.approx(1 / len(values), abs=0.06)


def test_a_task_without_conditions_draws_the_plain_world() -> None:
    task = get_task_spec("cifar_scale")
    assert draw_condition(task, 0, 1, 2) == Condition(
        crippled=(False,) * 5, train_size=None, label_noise=0.0, learning_rate=task.optimizer.host_lr
    )
    assert draw_condition(get_task_spec("sotu"), 0, 0, 0).crippled == ()


def test_a_condition_changes_its_row_alone() -> None:
    task = replace(get_task_spec("digits_shift"), optimizer=OptimizerConfig(host_lr=0.1, seed_lr=0.2))
    (model, optimizer), (plain, _) = fresh(task), fresh(task)
    apply_condition(
        model,
        optimizer,
        3,
        Condition(crippled=(True, False), train_size=200, label_noise=0.0, learning_rate=0.01),
    )
    x = torch.randn(4, 8, 8, 8, generator=torch.Generator().manual_seed(0))
    model.eval(), plain.eval()
    same = (model(x) == plain(x)).flatten(1).all(1).tolist()
    assert same == [row != 3 for row in range(8)]
    assert isinstance(model.host, CNNHost)
    assert optimizer.host_lr.tolist() == pytest.approx([0.1] * 3 + [0.01] + [0.1] * 4)
    assert optimizer.seed_lr.tolist() == pytest.approx([0.2] * 3 + [0.02] + [0.2] * 4)
    # The next condition of the same row leaves nothing behind.
    apply_condition(
        model,
        optimizer,
        3,
        Condition(crippled=(False, False), train_size=None, label_noise=0.0, learning_rate=0.1),
    )
    torch.testing.assert_close(model(x), plain(x), rtol=0, atol=0)
    assert optimizer.host_lr.tolist() == pytest.approx([0.1] * 8)


def test_a_condition_must_fit_its_host() -> None:
    model, optimizer = fresh(get_task_spec("digits_shift"))
    with pytest.raises(EsperError, match="3 marks"):
        apply_condition(
            model,
            optimizer,
            0,
            Condition(crippled=(True,) * 3, train_size=None, label_noise=0.0, learning_rate=0.1),
        )
    with pytest.raises(PopulationError, match="row 8 is out of range"):
        apply_condition(
            model,
            optimizer,
            8,
            Condition(crippled=(True,) * 2, train_size=None, label_noise=0.0, learning_rate=0.1),
        )
    model, optimizer = fresh(get_task_spec("sotu"))
    with pytest.raises(EsperError, match="a transformer host has none"):
        apply_condition(
            model,
            optimizer,
            0,
            Condition(crippled=(True,), train_size=None, label_noise=0.0, learning_rate=0.1),
        )


# -- the documentation ---------------------------------------------------------------------------------------


def test_the_documented_task_works(registry: dict[str, TaskSpec]) -> None:
    before = set(registry)
    own, driving = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(own, str(DOCS), "exec"), {})
    (added,) = set(registry) - before
    assert get_task_spec(added).host_params == sum(
        p.numel() for p in build_host(dict(get_task_spec(added).host)).parameters()
    )
    scope: dict = {}
    exec(compile(driving, str(DOCS), "exec"), scope)
    assert torch.isfinite(scope["model"](scope["batch"].x)).all()


def test_every_task_is_documented() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert [name for name in task_names() if f"`{name}`" not in text] == []


def test_a_whole_task_can_be_written_out() -> None:
    task = TaskSpec(
        name="vectors",
        host={"kind": "mlp", "inputs": 64},
        slots=("r0c0",),
        dataset="digits_flat",
        batch_size=8,
        steps_per_epoch=1,
        val_size=8,
        episode_length=2,
        population=1,
        optimizer=OptimizerConfig(),
        lr_decay=False,
        pacing=Pacing(),
        gates=GateConfig(),
        objective=ObjectiveConfig(),
        blueprints=("mlp",),
    )
    assert (task.topology, task.num_classes, task.conditions) == ("mlp", 10, None)


# -- budgets of FLOPs ----------------------------------------------------------------------------------------


def test_the_length_of_an_episode_follows_from_its_budget() -> None:
    task = get_task_spec("digits_flops")
    assert (task.budget, task.budget_steps, task.steps_per_epoch, task.episode_length) == (
        "flops",
        720,
        24,
        30,
    )
    assert get_task_spec("digits_flops:budget_steps=100").episode_length == 5
    assert replace(task, steps_per_epoch=48).episode_length == 15
    budgets = ConditionSpace(cripple_probability=0.0, budgets=(24, 1000))
    assert replace(task, conditions=budgets).episode_length == 42
    with pytest.raises(EsperError, match="'episode_length=12' is not field=number for one of its sizes"):
        get_task_spec("digits_flops:episode_length=12")
    with pytest.raises(EsperError, match="'budget_steps=12' is not field=number for one of its sizes"):
        get_task_spec("digits_shift:budget_steps=12")
    with pytest.raises(EsperError, match="with a budget of epochs"):
        replace(get_task_spec("digits_shift"), conditions=budgets)
    with pytest.raises(EsperError, match="budgets is 0, must be a whole number from 1 up"):
        ConditionSpace(cripple_probability=0.0, budgets=(0,))


def test_a_drawn_budget_changes_no_other_draw() -> None:
    task = get_task_spec("digits_flops")
    space = ConditionSpace(cripple_probability=0.5, train_sizes=(200, 800), learning_rates=(0.01, 0.03))
    plain = [draw_condition(replace(task, conditions=space), 0, 0, env) for env in range(32)]
    space = replace(space, budgets=(100, 300))
    drawn = [draw_condition(replace(task, conditions=space), 0, 0, env) for env in range(32)]
    assert {condition.budget_steps for condition in plain} == {720}
    assert {condition.budget_steps for condition in drawn} == {100, 300}
    assert [replace(condition, budget_steps=720) for condition in drawn] == plain


def test_the_learning_rate_follows_the_share_of_the_budget() -> None:
    task = get_task_spec("digits_flops")
    assert [task.lr_factor_at(share) for share in (0.0, 0.5, 1.0)] == pytest.approx([1.0, 0.55, 0.1])
    assert replace(task, lr_decay=False).lr_factor_at(0.7) == 1.0
