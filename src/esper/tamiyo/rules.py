"""Two rules of thumb that decide when to grow: at fixed parts of the horizon, and on a plateau.

Both graft a seed into the last slot that is free, where a gradient arrives first, and make every seed
permanent as soon as its gate opens. They act through the same interface as the learned policy.

E envs, S slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from esper.leyline import (
    OP_GERMINATE,
    ActionMasks,
    EsperError,
    PolicyObservation,
    PolicyStep,
    blueprint_index,
    check_number,
)
from esper.tamiyo.columns import first_columns
from esper.tamiyo.features import BASE, SLOT
from esper.tamiyo.masks import blueprint_mask
from esper.tamiyo.scripted import ScriptedPolicy, as_step, germinate, keep_ripe, waiting

BLUEPRINTS = ("conv_light", "depthwise", "mlp_small", "lora", "norm")
"""Blueprints to germinate, strongest first; the first that is offered is taken."""
_COLUMN, _DEPTH = first_columns(BASE), first_columns(SLOT)["depth"]


class GrowthRule(ScriptedPolicy):
    """Base of both rules: a subclass says in which envs it is time to grow."""

    def __init__(self, envs: int, *, blueprints: Sequence[str] = BLUEPRINTS) -> None:
        blueprint_mask(blueprints)
        self.blueprints = tuple(blueprints)
        self.begin(envs)

    def begin(self, num_envs: int) -> None:
        self._epoch = 0
        self._planted = [0] * num_envs
        self._since = [0] * num_envs
        """Epochs since the last germination, or since the start."""

    def state(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "planted": list(self._planted), "since": list(self._since)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._epoch = state["epoch"]
        self._planted, self._since = list(state["planted"]), list(state["since"])

    def _is_time(self, base: Tensor, env: int) -> bool:
        raise NotImplementedError

    def act(
        self, obs: PolicyObservation, hidden: object, masks: ActionMasks, *, deterministic: bool = False
    ) -> PolicyStep:
        if len(masks.op) != len(self._planted):
            raise EsperError(f"{len(masks.op)} envs, this policy was made for {len(self._planted)}")
        self._epoch += 1
        actions = waiting(len(masks.op))
        base, legal, offered = obs.base.cpu(), masks.slot_by_op.cpu().numpy(), masks.blueprint.cpu()
        depths = obs.slots[..., _DEPTH].tolist()
        for env in range(len(actions)):
            self._since[env] += 1
            free = legal[env, OP_GERMINATE].nonzero()[0].tolist()
            names = [name for name in self.blueprints if offered[env, blueprint_index(name)]]
            if free and names and self._is_time(base[env], env):
                self._planted[env] += 1
                self._since[env] = 0
                germinate(actions[env], max(free, key=depths[env].__getitem__), blueprint_index(names[0]))
            else:
                keep_ripe(actions[env], legal[env])
        return as_step(actions)


class Periodic(GrowthRule):
    """One seed after each of the first `parts` − 1 equal parts of the horizon. It reads the share of the
    horizon that is over, so it does nothing where the horizon is unknown."""

    def __init__(self, envs: int, *, parts: int = 4, blueprints: Sequence[str] = BLUEPRINTS) -> None:
        check_number("periodic", "parts", parts, low=2, integer=True)
        self.parts = parts
        super().__init__(envs, blueprints=blueprints)

    def _is_time(self, base: Tensor, env: int) -> bool:
        passed = float(base[_COLUMN["progress"]]) * self.parts + 1e-6  # the feature is a float32
        return self._planted[env] < min(int(passed), self.parts - 1)


class Plateau(GrowthRule):
    """One seed whenever the metric has not gained for `patience` epochs, and at least as many have passed
    since the last seed; at most `max_seeds`."""

    def __init__(
        self, envs: int, *, patience: int = 3, max_seeds: int = 3, blueprints: Sequence[str] = BLUEPRINTS
    ) -> None:
        check_number("plateau", "patience", patience, low=1, integer=True)
        check_number("plateau", "max_seeds", max_seeds, low=1, integer=True)
        self.patience, self.max_seeds = patience, max_seeds
        super().__init__(envs, blueprints=blueprints)

    def _is_time(self, base: Tensor, env: int) -> bool:
        without_gain = float(base[_COLUMN["plateau_so_far"]]) * self._epoch
        return (
            self._planted[env] < self.max_seeds
            and without_gain >= self.patience - 0.5
            and self._since[env] >= self.patience
        )
