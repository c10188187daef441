"""`esper.attach` and `esper.load`: a user's model becomes one that can grow, in place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from esper.grower import decide, distributed, saving
from esper.grower.body import Body, attached_part
from esper.grower.facts import model_facts
from esper.grower.grower import METRICS, Grower, StepResult
from esper.grower.places import (
    ESPER,
    Features,
    Place,
    SlotAt,
    find_places,
    nearest_parameter,
    run_example,
    undisturbed,
)
from esper.grower.record import Recorder
from esper.grower.slot import hide_child, remove_child, splice, unsplice
from esper.leyline import EsperError, ObjectiveConfig, allowed, check_number, format_slot_id

PRICES = ObjectiveConfig()
"""Unless the user names others."""


def attach(
    model: nn.Module,
    slots: Sequence[str | SlotAt],
    example: Any,
    *,
    policy: decide.PolicyLike = decide.AUTO,
    epochs: int | None = None,
    classes: int | None = None,
    metric: str = "accuracy",
    evaluate: Callable[[], float] | None = None,
    blueprints: Sequence[str] | None = None,
    record: str | Path | None = None,
    seed: int = 0,
    size_price: float = PRICES.size_price,
    waste_price: float = PRICES.waste_price,
    flops_budget: bool = False,
) -> Grower:
    """Let a model grow while you train it. The model stays the same object with the same outputs and the same
    keys; what grows is under `_esper`.

    Args:
        model: Any module. Attach before you build the optimizer and before you wrap it in DDP.
        slots: Names of modules, as in `model.named_modules()`, whose output a seed may follow. A `*` matches
            any part of a name. `SlotAt` says more, if needed.
        example: An input of the model: a tensor, a tuple of arguments, or a dict of keyword arguments.
        policy: Who decides: the name or path of a learned policy or run, "heuristic", "periodic", "plateau",
            a schedule of (epoch, slot, blueprint), a function of the grower, or None to grow by hand. "auto"
            is the learned policy "general" on images and "heuristic" on tokens and vectors.
        epochs: Number of epochs that you will train; unknown if not given.
        classes: Number of classes of the task; unknown if not given.
        metric: What `grower.step` is given: "accuracy" in [0, 1], or "loss", where smaller is better.
        evaluate: Returns your validation metric of the model as it is. With it the contribution of each seed
            is measured, at the cost of one evaluation per seed and epoch.
        blueprints: Names of the blueprints that may be planted. By default all that suit the slots, except
            those that mix tokens: they are causal.
        record: New directory in which the run is recorded, for `esper watch`, `report`, `sql` and `compare`.
        seed: Random seed of the newborn seeds' weights.
        size_price: λ: how much accuracy, in [0, 1], you would give to save parameters. Growth is charged
            λ · ln(1 + added/host parameters); 0: only accuracy counts.
        waste_price: κ: the same for each seed that is planted and not kept.
        flops_budget: Whether you train for a fixed number of FLOPs, or time, so that a larger network takes
            fewer steps.
    """
    model = _unwrapped(model)
    if metric not in METRICS:
        raise EsperError(f"metric is {metric!r}; {allowed(METRICS)}")
    for name, value in (("epochs", epochs), ("classes", classes)):
        if value is not None:
            check_number("attach", name, value, low=1, integer=True)
    check_number("attach", "seed", seed, integer=True)
    prices = ObjectiveConfig(size_price=size_price, waste_price=waste_price)
    if evaluate is not None and not callable(evaluate):
        raise EsperError(f"attach: evaluate is {evaluate!r}, must be a function that returns the metric")
    if blueprints is not None and (isinstance(blueprints, str) or not isinstance(blueprints, Collection)):
        name = blueprints if isinstance(blueprints, str) else "conv_light"
        raise EsperError(f"attach: blueprints is {blueprints!r}, must be a list of names, such as [{name!r}]")
    places, features, before = find_places(model, slots, example)
    policy = decide.choose(policy, images=places[0].is_image)
    by_clock = policy is not None and (evaluate is None or decide.is_learned(policy))
    body = _insert(model, places, features, measures=evaluate is not None, makes_permanent=by_clock)
    try:
        _check_unchanged(model, example, before)
        offered = decide.offered_blueprints(body, blueprints)
        decider = decide.make_policy(policy, body, epochs, offered)
        facts = None
        if decider is not None:
            facts = model_facts(model, body, example, classes=classes, val_samples=None)
        rules = decide.make_rules(body, offered, epochs, seed, prices)
        recorder = None
        if record is not None and distributed.is_first_rank():
            recorder = Recorder(
                record,
                body,
                model=type(model).__name__,
                policy=_described(policy),
                epochs=epochs,
                classes=classes,
                blueprints=offered,
                seed=seed,
                prices=prices,
            )
        return Grower(
            model,
            body,
            policy=decider,
            rules=rules,
            facts=facts,
            epochs=epochs,
            metric=metric,
            evaluate=evaluate,
            recorder=recorder,
            flops_budget=flops_budget,
        )
    except BaseException:
        detach(model, body)
        raise


def _described(policy: decide.PolicyLike) -> str:
    if policy is None:
        return "by hand"
    if isinstance(policy, (str, Path)):
        return str(policy)
    return getattr(policy, "__name__", type(policy).__name__)


def load(model: nn.Module, path: str | Path) -> Grower:
    """Give a fresh model, built as it was before it grew, the structure and weights that `grower.save` has
    written. The grower that is returned grows by hand; `grower.export()` gives the plain module."""
    model = _unwrapped(model)
    content, tensors = saving.read_grown(path)
    for place in content.slots:
        try:
            model.get_submodule(place.name)
        except AttributeError:
            raise EsperError(f"{path}: the model has no module {place.name!r}, which grew a seed") from None
    history = [saving.as_result(StepResult, entry) for entry in content.history]
    features = [_stored_features(model, place, i, tensors) for i, place in enumerate(content.slots)]
    body = _insert(model, content.slots, features, measures=False, makes_permanent=False)
    try:
        structure = {"slots": body.structure()["slots"]}
        structure |= {"seeds": content.seeds, "germinations": content.germinations}
        body.restore(structure, path)
        offered = decide.offered_blueprints(body, None)
        rules = decide.make_rules(body, offered, None, 0, PRICES)
        grower = Grower(model, body, policy=None, rules=rules, epochs=None, metric="accuracy", evaluate=None)
        saving.load_weights(model, tensors, path)
    except BaseException:
        detach(model, body)
        raise
    grower.history = history
    return grower


def _stored_features(model: nn.Module, place: Place, index: int, tensors: Mapping[str, Tensor]) -> Features:
    """A stored seed has the dtype that it needs. Where there is none, the module before it tells."""
    prefix = f"{ESPER}.seed_slots.{format_slot_id(0, index)}."
    stored = [t for name, t in tensors.items() if name.startswith(prefix) and t.is_floating_point()]
    like = nearest_parameter(model, place.name)
    return Features(None, like.device, stored[0].dtype if stored else like.dtype)


def detach(model: nn.Module, body: Body) -> None:
    """Undo `attach`: the model is as it was, its seeds are gone."""
    for slot in body:
        unsplice(model.get_submodule(slot.name), slot)
    remove_child(model)


def _unwrapped(model: Any) -> nn.Module:
    """The module itself, where a wrapper of torch.compile was given; other wrappers are refused."""
    if isinstance(model, torch._dynamo.eval_frame.OptimizedModule):
        model = model._orig_mod
    if not isinstance(model, nn.Module):
        raise EsperError(f"model is a {type(model).__name__}, must be a torch.nn.Module")
    if isinstance(model, (DistributedDataParallel, DataParallel)):
        raise EsperError(
            f"model is wrapped in {type(model).__name__}; attach to the module first, then wrap it"
        )
    if any("FSDP" in base.__name__ for module in model.modules() for base in type(module).__mro__):
        raise EsperError(
            "model is sharded by FSDP, which fixes its parameters; Esper grows models under "
            "DistributedDataParallel or in one process"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise EsperError("model is a TorchScript module, whose forward cannot be extended; attach before it")
    if ESPER in model._modules:
        raise EsperError(
            "model is attached already; use the grower that you have, or grower.export() for a copy without "
            "Esper"
        )
    part = attached_part(model)
    if part is not None:
        where = f"{part!r}, a part of this model," if part else "this part of a model"
        raise EsperError(f"{where} is attached already; attach the whole model once, with all its slots")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise EsperError(f"parameter {name!r} has no shape yet; run the model once before you attach it")
    return model


def _insert(
    model: nn.Module,
    places: Sequence[Place],
    features: Sequence[Features],
    *,
    measures: bool,
    makes_permanent: bool,
) -> Body:
    body = Body(model, places, measures=measures, makes_permanent=makes_permanent)
    for slot, received in zip(body, features, strict=True):
        slot.positions = received.positions
        slot.to(received.device, received.dtype)
    try:
        hide_child(model)
        model.add_module(ESPER, body)
        for slot in body:
            splice(model.get_submodule(slot.name), slot)
    except BaseException:
        detach(model, body)
        raise
    return body


def _check_unchanged(model: nn.Module, example: Any, before: Any) -> None:
    with undisturbed(model), torch.no_grad():
        after = run_example(model.eval(), example)
    for old, new in zip(_tensors(before), _tensors(after), strict=True):
        if not torch.equal(old.nan_to_num(), new.nan_to_num()):
            raise EsperError(
                "the model's output on the example changes when it runs twice, or when it gets the child "
                "_esper: does its forward run over self.children()? Attach to the part that does not"
            )


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        return [t for value in output.values() for t in _tensors(value)]
    if isinstance(output, (list, tuple)):
        return [t for value in output for t in _tensors(value)]
    return []
