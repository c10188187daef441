"""What a policy sees: tables of features from which the layout, the docs and the arrays are made.

Each feature has a name, a description, a source and a normaliser. A feature that may be unmeasured is
followed by a validity bit; without a measurement both columns are 0. Nothing depends on the units of one
task: accuracies are relative to chance, losses to guessing, sizes and FLOPs to the host, times to the budget,
gradients to other gradients. Everything is computed for all networks, slots and blueprints at once.

E envs, S slots, B registered blueprints, H epochs of history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from hashlib import blake2b

import numpy as np
import orjson
import torch

from esper.leyline import (
    OP_ADVANCE,
    OP_FOSSILIZE,
    STAGES,
    AlphaAlgorithm,
    AlphaMode,
    LifecycleOp,
    PolicyObservation,
    SeedStage,
)
from esper.leyline.facts import TRAITS
from esper.tamiyo.columns import Feature, Normaliser, Source, encode, width
from esper.tamiyo.inputs import Array, FeatureInputs
from esper.tamiyo.sources import (
    above_chance,
    accuracy_change,
    accuracy_slope,
    can,
    flops_share,
    guesses,
    in_errors,
    in_stage,
    is_value,
    last_op,
    loss_slope,
    net,
    over_error,
    over_span,
    over_time_left,
    place,
    points,
    price,
    quoted,
    quoted_trait,
    relative_sensor,
    report,
    resident_trait,
    sensor,
    share_in,
    share_of_episode,
    signal,
)

WINDOWS = {"last": 0.0, "eighth": 1 / 8, "third": 1 / 3}
"""Shares of the epochs so far, at least one epoch, over which changes of accuracy and loss are observed.
Fixed numbers of epochs would show less change where epochs are shorter."""
UP_TO_TWO = Normaliser(high=2.0)
RELATIVE = Normaliser(low=-1.0, high=1.5)
"""Accuracies relative to chance: 0 is guessing, 1 is perfect."""
DIFFERENCE = Normaliser(unit=0.1, low=-3.0, high=3.0)
"""Differences of such accuracies, and prices in the same unit."""
DEVIATIONS = Normaliser(unit=2.0, low=-3.0, high=3.0)
"""Differences in standard errors: 2 become 1."""
GUESSES = Normaliser("log1p", high=3.0)
"""Losses relative to that of guessing."""
RATIO = Normaliser("log", low=-3.0, high=3.0)
"""Ratios that differ by factors of a few."""
SCALE = Normaliser("log", unit=2.0, low=-3.0, high=3.0)
"""Ratios that differ by orders of magnitude between worlds."""
MAGNITUDE = Normaliser("log", unit=3.0, low=-3.0, high=3.0)
"""Sizes relative to the host."""
GROWTH = Normaliser("log1p", high=3.0)
PRICE = Normaliser("log1p", unit=7.0, high=2.0)
"""Prices in thousandths of J: 0 stays 0, 0.001 becomes 0.1, 0.01 0.34, 0.1 0.66 and 1 becomes 0.99."""


def sensor_feature(name: str, meaning: str, normaliser: Normaliser) -> Feature:
    """The slot feature that shows a sensor."""
    return Feature(name, meaning, sensor(name), normaliser, True)


def _span(window: str) -> str:
    return "the last epoch" if window == "last" else f"the last {window} of the epochs so far"


BASE: tuple[Feature, ...] = (
    Feature("progress", "share of the budget that is spent", signal("progress"), optional=True),
    Feature(
        "flops_budget",
        "1 if the budget counts training FLOPs, so that a larger network trains for fewer steps",
        Source("budget in FLOPs", lambda x: np.full(len(x.table), float(x.setting.flops_budget))),
    ),
    Feature(
        "steps_left",
        "optimizer steps that are left: the one absolute number, because learning takes steps",
        signal("steps_left"),
        Normaliser("log1p", unit=8.0, high=3.0),
        True,
    ),
    Feature(
        "time_needed",
        "epochs that a seed germinated now takes to become permanent, at the fastest tempo, over epochs left",
        over_time_left(
            "least epochs to permanence",
            lambda x: np.full(len(x.table), float(min(x.setting.epochs_needed))),
        ),
        UP_TO_TWO,
        True,
    ),
    Feature(
        "val_accuracy",
        "validation accuracy: 0 is chance, 1 is perfect",
        above_chance("val_accuracy", lambda x: x.signals["val_accuracy"]),
        RELATIVE,
        True,
    ),
    Feature(
        "train_accuracy",
        "training accuracy, likewise",
        above_chance("train_accuracy", lambda x: x.signals["train_accuracy"]),
        RELATIVE,
        True,
    ),
    Feature(
        "below_best",
        "best validation accuracy so far minus that of now, over 1 − chance",
        over_span(
            "best_accuracy - val_accuracy", lambda x: x.signals["best_accuracy"] - x.signals["val_accuracy"]
        ),
        DIFFERENCE,
    ),
    Feature(
        "generalisation_gap",
        "training accuracy minus validation accuracy, over 1 − chance",
        over_span(
            "train_accuracy - val_accuracy", lambda x: x.signals["train_accuracy"] - x.signals["val_accuracy"]
        ),
        DIFFERENCE,
        True,
    ),
    Feature(
        "val_noise",
        "standard error of the validation accuracy, over 1 − chance",
        over_span("standard error", lambda x: x.standard_error),
        Normaliser(unit=0.03, high=3.0),
        True,
    ),
    Feature(
        "val_loss", "validation loss over that of guessing, ln(classes)", guesses("val_loss"), GUESSES, True
    ),
    Feature("train_loss", "training loss, likewise", guesses("train_loss"), GUESSES, True),
    *(
        Feature(
            f"accuracy_change_{name}",
            f"change of validation accuracy over {_span(name)}, in standard errors of a difference",
            accuracy_change(share),
            DEVIATIONS,
            True,
        )
        for name, share in WINDOWS.items()
    ),
    *(
        Feature(
            f"accuracy_slope_{name}",
            f"share of the remaining error that is gained by the end at the pace of {_span(name)}",
            accuracy_slope(share),
            Normaliser(low=-3.0, high=3.0),
            True,
        )
        for name, share in WINDOWS.items()
    ),
    *(
        Feature(
            f"loss_slope_{name}",
            f"change of ln(validation loss) over that of ln(time), over {_span(name)}",
            loss_slope(share),
            Normaliser(low=-3.0, high=3.0),
            True,
        )
        for name, share in WINDOWS.items()
    ),
    Feature(
        "expected_end",
        "validation accuracy at the end without growth, if it stays linear in ln(time): 0 is chance",
        above_chance("expected end", lambda x: x.expected_end),
        RELATIVE,
        True,
    ),
    Feature(
        "expected_gain",
        "share of the remaining error that is gained by then",
        over_error("expected end - accuracy", lambda x: x.expected_end - x.signals["val_accuracy"]),
        Normaliser(low=-1.5, high=1.5),
        True,
    ),
    Feature(
        "plateau",
        "epochs since the last gain of accuracy, as a share of the episode",
        Source("plateau / epochs of the episode", lambda x: x.signals["plateau_epochs"] / x.length),
        optional=True,
    ),
    Feature(
        "plateau_so_far",
        "the same as a share of the epochs so far",
        Source("plateau / epoch", lambda x: x.signals["plateau_epochs"] / x.signals["epoch"]),
    ),
    Feature("host_settled", "1 once the loss has stabilised", signal("host_stabilized")),
    Feature(
        "incubating",
        "share of slots with a seed that is not yet blended",
        share_in(SeedStage.GERMINATED, SeedStage.TRAINING),
    ),
    Feature("blending", "share of slots with a blending seed", share_in(SeedStage.BLENDING)),
    Feature("holding", "share of slots with a holding seed", share_in(SeedStage.HOLDING)),
    Feature("fossilized", "share of slots with a fossil", share_in(SeedStage.FOSSILIZED)),
    Feature(
        "added",
        "parameters of all seeds over those of the host",
        Source("sum of seeds' params / host params", lambda x: x.added),
        GROWTH,
    ),
    Feature(
        "flops_added",
        "training FLOPs of all seeds over those of the host",
        Source("sum of seeds' FLOPs / host FLOPs", lambda x: x.flops_added),
        GROWTH,
        True,
    ),
    Feature(
        "size_price", "λ over 1 − chance, in thousandths of J: price of size", price("size_price"), PRICE
    ),
    Feature("waste_price", "κ, likewise: price of a seed that is not kept", price("waste_price"), PRICE),
    Feature("rollback_price", "price of a rollback, likewise", price("rollback_price"), PRICE),
    Feature(
        "learning_rate",
        "learning rate of the host, in hundredths",
        Source("100 learning rate", lambda x: 100 * x.learning_rate),
        Normaliser("log", unit=2.3, low=-3.0, high=3.0),
        True,
    ),
    Feature(
        "last_success", "1 if the last action was executed", Source("last success", lambda x: x.last_success)
    ),
    *(
        Feature(f"last_{op.name.lower()}", f"1 if the last action was {op.name}", last_op(op))
        for op in LifecycleOp
    ),
)

SLOT: tuple[Feature, ...] = (
    Feature(
        "depth",
        "place of the slot in the order in which activations pass them: 0 first, 1 last",
        place("depth"),
    ),
    Feature("channels", "channels at the slot over those of the widest slot", place("width")),
    Feature(
        "resolution", "positions at the slot over those of the input", place("resolution"), optional=True
    ),
    Feature(
        "params_before",
        "share of the host's parameters before the slot",
        place("params_before"),
        optional=True,
    ),
    Feature(
        "flops_before", "share of the host's FLOPs before the slot", place("flops_before"), optional=True
    ),
    *(
        Feature(f"stage_{stage.name.lower()}", f"1 if the stage is {stage.name}", in_stage(stage))
        for stage in STAGES
        if stage is not SeedStage.UNKNOWN
    ),
    Feature("alpha", "weight with which the seed is blended in", report("alpha")),
    Feature(
        "alpha_distance",
        "target of alpha minus alpha",
        Source("report alpha_target - alpha", lambda x: x.table["alpha_target"] - x.table["alpha"]),
    ),
    Feature(
        "time_to_target",
        "epochs until the alpha ramp ends, over epochs left",
        over_time_left(
            "report alpha_steps_total - alpha_steps_done, 0 or more",
            lambda x: np.maximum(x.table["alpha_steps_total"] - x.table["alpha_steps_done"], 0),
        ),
        UP_TO_TWO,
        True,
    ),
    *(
        Feature(
            f"alpha_{mode.name.lower()}", f"1 if the alpha mode is {mode.name}", is_value("alpha_mode", mode)
        )
        for mode in AlphaMode
    ),
    *(
        Feature(
            f"mixes_by_{a.name.lower()}",
            f"1 if the blend operator is {a.name}",
            is_value("alpha_algorithm", a),
        )
        for a in AlphaAlgorithm
    ),
    Feature(
        "tempo",
        "length of the first alpha ramp, as a share of the episode",
        share_of_episode("tempo_epochs"),
        UP_TO_TWO,
        True,
    ),
    Feature(
        "stage_age",
        "epochs in this stage, as a share of the episode",
        share_of_episode("epochs_in_stage"),
        optional=True,
    ),
    Feature(
        "age",
        "epochs since germination, as a share of the episode",
        share_of_episode("epochs_total"),
        optional=True,
    ),
    Feature(
        "seed_size",
        "parameters of the seed over those of the host",
        Source("seed's params / host params", lambda x: np.where(x.present, x.sizes, np.nan)),
        MAGNITUDE,
        True,
    ),
    Feature(
        "seed_flops",
        "training FLOPs of the seed over those of the host",
        Source(
            "seed's FLOPs / host FLOPs",
            lambda x: np.where(
                x.present, x.of_resident(x.setting.facts.seed_flops) / x.setting.facts.flops, np.nan
            ),
        ),
        MAGNITUDE,
        True,
    ),
    *(
        Feature(f"seed_{trait}", f"{trait} of the seed, or of the one whose slot cools down", source)
        for trait, source in ((trait, resident_trait(i)) for i, trait in enumerate(TRAITS))
    ),
    Feature(
        "contribution",
        "accuracy lost without the seed (leave-one-out), over 1 − chance",
        points("contribution"),
        DIFFERENCE,
        True,
    ),
    Feature(
        "contribution_deviations",
        "the same in standard errors of a difference",
        in_errors("contribution"),
        DEVIATIONS,
        True,
    ),
    Feature(
        "contribution_net",
        "the same minus the price of the seed's size",
        net("contribution"),
        DIFFERENCE,
        True,
    ),
    Feature(
        "first_net",
        "the first contribution that was measured minus the price of the seed's size",
        net("first_contribution"),
        DIFFERENCE,
        True,
    ),
    Feature(
        "contribution_velocity",
        "smoothed change of the contribution per epoch, in standard errors of a difference",
        in_errors("contribution_velocity"),
        DEVIATIONS,
        True,
    ),
    Feature(
        "contribution_age",
        "epochs since the contribution was measured, as a share of the episode",
        share_of_episode("contribution_age"),
        optional=True,
    ),
    Feature(
        "interaction",
        "sum of the seed's pairwise interactions with other seeds, over 1 − chance",
        points("interaction_sum"),
        DIFFERENCE,
        True,
    ),
    Feature(
        "boost",
        "largest positive interaction with another seed, over 1 − chance",
        points("boost_received"),
        DIFFERENCE,
        True,
    ),
    Feature(
        "improvement",
        "accuracy gained since the stage began, over 1 − chance",
        points("current_accuracy", minus="stage_start_accuracy"),
        DIFFERENCE,
        True,
    ),
    Feature(
        "improvement_total",
        "accuracy gained since germination, over 1 − chance",
        points("current_accuracy", minus="initial_accuracy"),
        DIFFERENCE,
        True,
    ),
    Feature(
        "gradient_ratio",
        "the seed's gradient over the host's, per parameter",
        report("gradient_ratio"),
        SCALE,
        True,
    ),
    Feature(
        "gradient_health",
        "1 if every tensor of the seed has a gradient that neither vanishes nor explodes",
        report("gradient_health"),
        optional=True,
    ),
    Feature("can_advance", "1 if the gate of the next stage is open", can("advance", OP_ADVANCE)),
    Feature("can_fossilize", "1 if the gate to FOSSILIZED is open", can("fossilize", OP_FOSSILIZE)),
    Feature(
        "boundary_norm_relative",
        "norm of the loss gradient at the slot over its geometric mean across slots",
        relative_sensor("boundary_norm"),
        RATIO,
        True,
    ),
    Feature(
        "growth_score",
        "gradient that a zero-initialised layer in this slot would receive, relative to the host's",
        sensor("growth_score"),
        SCALE,
        True,
    ),
    Feature(
        "growth_score_relative",
        "the same over its geometric mean across slots",
        relative_sensor("growth_score"),
        RATIO,
        True,
    ),
    Feature(
        "feature_rank",
        "logarithm of the effective number of independent channels that reach the slot, over that of all",
        sensor("feature_rank"),
        optional=True,
    ),
    Feature(
        "tap_ratio",
        "off-centre over centre taps of that gradient: above 1, spatial reach is missing",
        sensor("tap_ratio"),
        RATIO,
        True,
    ),
)

QUOTE: tuple[Feature, ...] = (
    Feature(
        "offered",
        "1 if the blueprint may be germinated and can grow in this slot; the rest is 0 where it is not",
        Source("offered and can grow", lambda x: np.ones((len(x.table), *x.setting.facts.seed_params.shape))),
    ),
    Feature(
        "price",
        "λ times the rise of ln(1 + added/host parameters), over 1 − chance: what its size would cost in J",
        Source("price of one more seed", lambda x: x.quoted_prices),
        DIFFERENCE,
    ),
    Feature(
        "params",
        "its parameters over those of the host",
        Source(
            "params / host params",
            lambda x: quoted(x, x.setting.facts.seed_params / max(x.setting.facts.params, 1)),
        ),
        MAGNITUDE,
    ),
    Feature(
        "flops",
        "its training FLOPs over those of the host",
        Source("FLOPs / host FLOPs", lambda x: quoted(x, x.setting.facts.seed_flops / x.setting.facts.flops)),
        MAGNITUDE,
        True,
    ),
    Feature(
        "flops_share",
        "share that it would have of the training FLOPs of the network as it is now",
        Source("FLOPs / FLOPs of host, seeds and itself", flops_share),
    ),
    *(
        Feature(trait, meaning, quoted_trait(i))
        for i, (trait, meaning) in enumerate(
            zip(
                TRAITS,
                (
                    "share of the positions, along the longest side, that one output position reads",
                    "1 if an output position reads other positions",
                    "1 if an output channel reads other channels of the same position",
                    "1 if its output is a product with its input",
                ),
                strict=True,
            )
        )
    ),
)

BASE_DIM, SLOT_DIM, QUOTE_DIM = width(BASE), width(SLOT), width(QUOTE)


def schema(extra: Sequence[Feature] = ()) -> str:
    """A hash of what each column means: name, source, normaliser and validity of each feature. A policy that
    was trained on one observation must not be given another. The names of extra sensors follow the hash, so
    that a mismatch shows them. Blueprints are described by their quotes, so their names are no part of it."""
    rows = [
        [f.name, f.source.key, *(str(value) for value in astuple(f.normaliser)), f.optional]
        for table in (BASE, (*SLOT, *extra), QUOTE)
        for f in table
    ]
    digest = blake2b(orjson.dumps(rows), digest_size=8).hexdigest()
    return "+".join([digest, *(feature.name for feature in extra)])


def _encode_quotes(inputs: FeatureInputs) -> Array:
    """[E, S, B, QUOTE_DIM], zeros where a blueprint is not offered or cannot grow."""
    setting = inputs.setting
    there = setting.offered & np.isfinite(setting.facts.seed_params)
    return np.where(there[..., None], encode(QUOTE, inputs), np.float32(0.0))


def batch_obs_to_features(
    inputs: FeatureInputs, device: torch.device | str = "cpu", *, extra: Sequence[Feature] = ()
) -> PolicyObservation:
    """base [E, BASE_DIM], slots [E, S, SLOT_DIM + width(extra)], quotes [E, S, B, QUOTE_DIM] and blueprint
    indices [E, S] (−1 where empty). `extra` are the features of registered sensors."""
    return PolicyObservation(
        base=torch.from_numpy(encode(BASE, inputs)).to(device),
        slots=torch.from_numpy(encode((*SLOT, *extra), inputs)).to(device),
        quotes=torch.from_numpy(_encode_quotes(inputs)).to(device),
        blueprints=torch.from_numpy(inputs.table["blueprint_index"].astype(np.int64)).to(device),
    )
