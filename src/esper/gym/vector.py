"""Many growing networks as a Gymnasium vector environment.

One step is one epoch of every network: the chosen action is carried out, then the next epoch is trained and
measured. Rewards and ends are the native environment's, bit for bit. E envs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from esper.gym.actions import WAIT, Bools, FlatActions, Granularity, HeadActions, IllegalAction, Indices
from esper.gym.infos import put
from esper.gym.observations import Floats, ObservationLayout
from esper.gym.population import Population, Setup
from esper.leyline import EsperError, RewardConfig, allowed, check_number
from esper.runtime.tasks import TaskSpec, get_task_spec
from esper.simic.training.evaluation import HELD_OUT

ACTIONS = ("heads", "flat")
ON_ILLEGAL = ("error", "wait")
Returned = tuple[Floats, npt.NDArray[np.float64], Bools, Bools, dict[str, Any]]


class GrowthVectorEnv(VectorEnv[Floats, npt.NDArray[Any], npt.NDArray[Any]]):
    """`num_envs` networks of one task, numbered from `first_network`, in populations of the task's width or
    of `population`. Rows of a population without an env are trained like the others and cost as much, unless
    the task has a budget of FLOPs.

    actions: `flat` (numbered decisions, see `FlatActions`; `granularity` is `plans` or `all`) or `heads` (one
    choice per head, see `HeadActions`). `metadata["action_names"]` and `metadata["observation_names"]` say
    what the numbers and columns mean.
    on_illegal: `error` raises `IllegalAction`; `wait` replaces the action by WAIT and says so in
    `info["illegal"]`.
    reward: a reward mode or its whole config. `sparse` pays J in the last step. `gamma` is the learner's
    discount, which the modes `shaped` and `escrow` need.
    twins: number of consecutive envs with the same initial weights, data and condition.
    held_out: the networks that policies are judged on. They are the same after every reset, whatever the
    random seed.
    autoreset_mode: None is `NEXT_STEP`. Episodes of a task with a budget of FLOPs end at different times, and
    a population is reset as a whole, so that `DISABLED` is the only mode unless the population is 1. An env
    whose episode has ended then stays terminated: it earns 0 and can only wait."""

    def __init__(
        self,
        task: str | TaskSpec,
        num_envs: int = 1,
        *,
        actions: Literal["flat", "heads"] = "flat",
        granularity: Granularity = "plans",
        autoreset_mode: AutoresetMode | str | None = None,
        on_illegal: Literal["error", "wait"] = "error",
        reward: str | RewardConfig = "sparse",
        gamma: float = 0.99,
        population: int | None = None,
        twins: int = 1,
        held_out: bool = False,
        first_network: int = 0,
    ) -> None:
        check_number("gym", "num_envs", num_envs, low=1, integer=True)
        check_number("gym", "twins", twins, low=1, integer=True)
        check_number("gym", "first_network", first_network, low=0, integer=True)
        for name, value, options in (("actions", actions, ACTIONS), ("on_illegal", on_illegal, ON_ILLEGAL)):
            if value not in options:
                raise EsperError(f"gym: {name} is {value!r}; {allowed(options)}")
        self.task = get_task_spec(task) if isinstance(task, str) else task
        if population is not None:
            self.task = replace(self.task, population=population)
        width = self.task.population
        if width % twins or num_envs % twins or first_network % twins:
            raise EsperError(
                f"gym: twins {twins} with a population of {width}, {num_envs} envs and first_network "
                f"{first_network}: each must be a multiple of the number of twins"
            )
        self.num_envs, self.on_illegal, self.held_out = num_envs, on_illegal, held_out
        self.autoreset_mode = self._resolve(autoreset_mode)
        self.layout = ObservationLayout(self.task)
        self.actions: FlatActions | HeadActions = (
            HeadActions(self.task) if actions == "heads" else FlatActions(self.task, granularity)
        )
        self.single_observation_space, self.single_action_space = self.layout.space, self.actions.space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.metadata = {
            "autoreset_mode": self.autoreset_mode,
            "render_modes": [],
            "observation_names": self.layout.names,
            "action_names": self.actions.names,
        }
        config = RewardConfig(mode=reward) if isinstance(reward, str) else reward
        setup = Setup(self.task, self.layout, config, gamma, twins)
        self.rows = [slice(first, min(first + width, num_envs)) for first in range(0, num_envs, width)]
        """The envs of each population."""
        self.populations = [
            Population(setup, range(first_network + rows.start, first_network + rows.stop))
            for rows in self.rows
        ]
        self._obs = np.zeros(self.observation_space.shape or (), np.float32)

    # -- Gymnasium -------------------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Floats, dict[str, Any]]:
        """Fresh networks. With `seed` they are those of a native run with that random seed, from its first
        episode on; without, their next episode follows. `options={"reset_mask": …}` resets the marked envs
        alone, which must be whole populations."""
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int | np.integer)):
            raise EsperError(f"gym: seed is {seed!r}; allowed: one whole number for all envs, or None")
        super().reset(seed=None if seed is None else int(seed))
        infos: dict[str, Any] = {}
        for population, rows in zip(self.populations, self.rows, strict=True):
            if self._marked(options)[rows].all():
                self._begin(population, None if seed is None else int(seed))
                self._obs[rows] = population.obs
                self._show_masks(infos, population, rows)
        return self._obs.copy(), infos

    def step(self, actions: npt.NDArray[Any]) -> Returned:
        """One decision of each env, then one epoch of training. An env whose episode has ended is reset
        instead, as the autoreset mode says."""
        native = self.actions.decode(actions, self.num_envs)
        illegal = self._check(native)
        rewards, ends = np.zeros(self.num_envs), np.zeros(self.num_envs, bool)
        infos: dict[str, Any] = {}
        for population, rows in zip(self.populations, self.rows, strict=True):
            if population.running:
                step = population.act(native[rows])
                rewards[rows], ends[rows] = step.rewards, population.over
                info = {**step.info, "illegal": illegal[rows][step.rows]}
                if len(step.ended) and self.autoreset_mode is AutoresetMode.SAME_STEP:
                    final = np.empty(len(population.obs), object)
                    final[:] = list(population.obs)
                    info = {"final_obs": final, "final_info": {**info, **step.final_info}}
                    self._begin(population, None)
                put(infos, rows.start + step.rows, info, self.num_envs)
                if self.autoreset_mode is not AutoresetMode.SAME_STEP:
                    put(infos, rows.start + step.ended, step.final_info, self.num_envs)
            else:
                self._begin(population, None)
            self._obs[rows] = population.obs
            self._show_masks(infos, population, rows)
        return self._obs.copy(), rewards, ends, np.zeros(self.num_envs, bool), infos

    def action_masks(self) -> Bools:
        """Legal choices now: [E, number of actions], or [E, sum of the heads' sizes]."""
        return np.concatenate([self.actions.masks(population.masks) for population in self._begun()])

    def slot_masks(self) -> Bools:
        """[E, ops, slots] legal slots given the op: what a mask of independent heads cannot say."""
        return np.concatenate([population.masks.slot_by_op for population in self._begun()])

    # -- parts -----------------------------------------------------------------------------------------------

    def _resolve(self, mode: AutoresetMode | str | None) -> AutoresetMode:
        ends_as_a_whole = self.task.budget == "epochs" or self.task.population == 1
        if mode is None:
            return AutoresetMode.NEXT_STEP if ends_as_a_whole else AutoresetMode.DISABLED
        given = AutoresetMode(mode)
        if given is not AutoresetMode.DISABLED and not ends_as_a_whole:
            raise EsperError(
                f"gym: autoreset_mode is {given.value} with task {self.task.name}, whose episodes end at "
                "different times and whose populations are reset as a whole; allowed: "
                f"{AutoresetMode.DISABLED.value}, or population=1"
            )
        return given

    def _begin(self, population: Population, seed: int | None) -> None:
        if self.held_out:
            population.begin(HELD_OUT, 0)
        elif seed is not None:
            population.begin(seed, 0)
        elif population.root_seed is None:
            population.begin(int(self.np_random.integers(2**31)), 0)
        else:
            population.begin_next()

    def _begun(self) -> list[Population]:
        if any(not hasattr(population, "masks") for population in self.populations):
            raise ResetNeeded("call reset first: there are no networks yet")
        return self.populations

    def _check(self, native: Indices) -> Bools:
        """[E] envs whose action is illegal; those are changed to WAIT in place, or an error names the first.
        Envs that this step resets, or whose episode is over, need no action."""
        illegal = np.zeros(self.num_envs, bool)
        for population, rows in zip(self._begun(), self.rows, strict=True):
            if population.running:
                illegal[rows] = ~population.masks.allow(native[rows]) & ~population.over
            elif self.autoreset_mode is not AutoresetMode.NEXT_STEP:
                raise ResetNeeded(
                    f"the episodes of envs {rows.start} to {rows.stop - 1} have ended; reset them first, "
                    'alone with options={"reset_mask": …}'
                )
        if illegal.any() and self.on_illegal == "error":
            env = int(illegal.argmax())
            place = next(i for i, rows in enumerate(self.rows) if env < rows.stop)
            reason = self.actions.vocabulary.why_illegal(
                env, env - self.rows[place].start, native[env], self.populations[place].masks
            )
            raise IllegalAction(f"{reason}. Choose by action_masks(), or pass on_illegal='wait'")
        native[illegal] = WAIT
        return illegal

    def _marked(self, options: Mapping[str, Any] | None) -> Bools:
        """[E] envs to reset."""
        if unknown := [key for key in options or {} if key != "reset_mask"]:
            raise EsperError(f"gym: option {unknown[0]!r} is unknown; allowed: reset_mask")
        if not options:
            return np.ones(self.num_envs, bool)
        mask = options["reset_mask"]
        if not isinstance(mask, np.ndarray) or mask.dtype != bool or mask.shape != (self.num_envs,):
            raise EsperError(f"gym: reset_mask is {mask!r}, must be a bool array of shape ({self.num_envs},)")
        if not mask.any():
            raise EsperError("gym: reset_mask marks no env")
        for population, rows in zip(self.populations, self.rows, strict=True):
            if mask[rows].any() and not mask[rows].all():
                raise EsperError(
                    f"gym: reset_mask marks only {int(mask[rows].sum())} of envs {rows.start} to "
                    f"{rows.stop - 1}; they are trained as one population and are reset together"
                )
            if not mask[rows].any() and population.root_seed is None:
                raise ResetNeeded("the first reset must cover all envs")
        return mask

    def _show_masks(self, infos: dict[str, Any], population: Population, rows: slice) -> None:
        put(infos, rows, {"action_mask": self.actions.masks(population.masks)}, self.num_envs)
