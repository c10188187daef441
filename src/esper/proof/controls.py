"""Controls of a learned policy: as many seeds at random places, and the policy with a part of its observation
hidden or reversed. If a control does as well as the policy, the policy does not use what was taken away.

E envs, S slots, B registered blueprints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from esper.leyline import (
    OP_GERMINATE,
    STYLE_ALPHA_ALGORITHMS,
    ActionMasks,
    EsperError,
    GerminationStyle,
    LifecycleOp,
    ObjectiveConfig,
    PolicyObservation,
    PolicyStep,
    TempoAction,
    blueprint_index,
    stream_seed,
)
from esper.proof.episodes import Maker, Played
from esper.runtime.worlds import SIZE_PRICES, WASTE_PRICES
from esper.simic.training.vector_env import VectorEnv
from esper.tamiyo.columns import first_columns
from esper.tamiyo.features import QUOTE
from esper.tamiyo.scripted import ScriptedPolicy, as_step, germinate, keep_ripe, waiting

OFFERED = first_columns(QUOTE)["offered"]
"""Column of a quote: 1 where the blueprint may be germinated and can grow in the slot."""


# -- the same amount at random places ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Amount:
    """A seed without its place."""

    epoch: int
    blueprint: str
    style: GerminationStyle


def amounts(played: Played) -> tuple[Amount, ...]:
    """The permanent seeds of a network, by the epoch of their germination. Seeds that were not kept are no
    part of it, so the control wastes none."""
    germinated = {
        decision.slot: decision.epoch
        for decision in played.decisions
        if decision.op == LifecycleOp.GERMINATE.name
    }
    styles = {STYLE_ALPHA_ALGORITHMS[style].name: style for style in GerminationStyle}
    seeds = [
        Amount(germinated[fossil.slot], fossil.blueprint, styles[fossil.algorithm])
        for fossil in played.fossils
    ]
    return tuple(sorted(seeds, key=lambda seed: (seed.epoch, seed.blueprint)))


class RandomPlacement(ScriptedPolicy):
    """Germinates given seeds at given epochs in random empty slots, and advances and fossilizes as soon as
    the gates open. A seed that is due but not possible now waits until it is."""

    def __init__(
        self,
        seeds: Sequence[Sequence[Amount]],
        networks: Sequence[int],
        *,
        root_seed: int,
        tempo: TempoAction = TempoAction.INSTANT,
    ) -> None:
        """The seeds of each network."""
        self.seeds = tuple(tuple(own) for own in seeds)
        self.networks, self.root_seed, self.tempo = tuple(networks), root_seed, tempo
        self.begin(len(self.seeds))

    def begin(self, num_envs: int) -> None:
        if num_envs != len(self.seeds) or num_envs != len(self.networks):
            raise EsperError(f"{num_envs} envs, this policy was made for {len(self.seeds)}")
        self._epoch = 0
        self._planted = [0] * num_envs

    def state(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "planted": list(self._planted)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._epoch, self._planted = state["epoch"], list(state["planted"])

    def act(
        self, obs: PolicyObservation, hidden: object, masks: ActionMasks, *, deterministic: bool = False
    ) -> PolicyStep:
        self._epoch += 1
        actions = waiting(len(masks.op))
        legal, in_time = masks.slot_by_op.cpu().numpy(), masks.tempo.cpu().numpy()
        offered = obs.quotes[..., OFFERED].cpu().numpy() > 0  # [E, S, B]
        for env, seeds in enumerate(self.seeds):
            number = self._planted[env]
            if number < len(seeds) and seeds[number].epoch <= self._epoch and in_time[env, self.tempo]:
                seed = seeds[number]
                blueprint = blueprint_index(seed.blueprint)
                free = np.flatnonzero(legal[env, OP_GERMINATE] & offered[env, :, blueprint])
                if len(free):
                    stream = stream_seed(self.root_seed, "sampling", 0, self.networks[env], number)
                    slot = int(np.random.default_rng(stream).choice(free))
                    germinate(actions[env], slot, blueprint, style=seed.style, tempo=self.tempo)
                    self._planted[env] += 1
                    continue
            keep_ripe(actions[env], legal[env])
        return as_step(actions)


def random_placement(stratum: Sequence[Played], *, root_seed: int, tempo: TempoAction) -> Maker:
    """Makes the control of one learned policy from its episodes."""
    seeds = {played.network: amounts(played) for played in stratum}
    return lambda networks: RandomPlacement(
        [seeds[network] for network in networks], networks, root_seed=root_seed, tempo=tempo
    )


# -- parts of the observation --------------------------------------------------------------------------------


def hide_quotes(obs: PolicyObservation) -> PolicyObservation:
    """Hides what each blueprint would cost and do. That it is offered stays: masks tell it too."""
    hidden = torch.zeros_like(obs.quotes)
    hidden[..., OFFERED] = obs.quotes[..., OFFERED]
    return replace(obs, quotes=hidden)


def reversed_prices(prices: ObjectiveConfig) -> ObjectiveConfig:
    """λ and κ mirrored within the range that worlds draw them from, in logarithms: the highest looks like the
    lowest. No price looks like the highest."""

    def mirror(price: float, limits: tuple[float, float]) -> float:
        low, high = limits
        return low * high / price if price else high

    return replace(
        prices,
        size_price=mirror(prices.size_price, SIZE_PRICES),
        waste_price=mirror(prices.waste_price, WASTE_PRICES),
    )


def show_reversed_prices(env: VectorEnv) -> None:
    """Prepares fresh networks: their policy observes reversed prices. J charges the true ones."""
    for member in env.envs:
        member.prices = reversed_prices(member.prices)
