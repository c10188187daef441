"""The grower: one call per epoch measures, decides and grows, in the user's own training loop.

The model, its optimizers and schedulers stay the objects that they are. The grower holds the bookkeeping of
growth and nothing of the training itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from esper.grower import decide, distributed, followers, saving
from esper.grower.body import Body
from esper.grower.export import export_model
from esper.grower.incubation import Incubator
from esper.grower.optimizers import Group, OptimizerLink
from esper.grower.places import undisturbed
from esper.grower.sensing import Measured, Sensing
from esper.kasmina.blueprints import blueprint_names
from esper.leyline import (
    LIVE_STAGES,
    EsperError,
    LifecycleOp,
    LifecycleRecord,
    OpResult,
    PolicyProtocol,
    SeedStage,
    SeedStateReport,
    TimeLeft,
    TrainingSignals,
    TransitionError,
    allowed,
    blueprint_id,
    check_number,
    stream_seed,
)
from esper.simic.contracts import ActionOutcome
from esper.simic.telemetry.decision import Considered
from esper.simic.training.action_execution import ActionRules, apply_action, parse_sampled_action
from esper.tamiyo.tracker import SignalTracker

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from esper.grower.record import Recorder
    from esper.leyline.facts import HostFacts

METRICS = ("accuracy", "loss")
STATE_VERSION = 2
"""Of `state_dict`. Version 1 did not say which policy and metric it belongs to."""
LARGEST_LOSS = 20.0
"""exp(−loss) is below 2·10⁻⁹ from here on: no policy sees a difference."""
SMALLEST = 1e-6
"""An accuracy below this counts as this when it is turned into a loss."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """One epoch of growth. `metric` is in the user's own unit; contributions are points, hundredths of an
    accuracy."""

    epoch: int
    metric: float
    op: str
    slot: str | None
    blueprint: str | None
    executed: bool
    changes: tuple[str, ...]
    """Everything that happened to seeds, by the decision or by the clock."""
    contributions: dict[str, float]
    parameters: int

    def __str__(self) -> str:
        grown = "; ".join(self.changes) or "nothing grew"
        return f"epoch {self.epoch}: metric {self.metric:.4f}, {self.parameters:,} parameters, {grown}"


@dataclass(frozen=True, slots=True)
class _Epoch:
    """An epoch's measurements, the same on every rank."""

    metric: float
    loss: float | None
    contributions: dict[str, float]
    measured: Measured


class Grower:
    """Made by `esper.attach` and `esper.load`. A policy needs `facts`: what it sees of the model."""

    def __init__(
        self,
        model: nn.Module,
        body: Body,
        *,
        policy: PolicyProtocol | None,
        rules: ActionRules,
        epochs: int | None,
        metric: str,
        evaluate: Callable[[], float] | None,
        facts: HostFacts | None = None,
        recorder: Recorder | None = None,
        flops_budget: bool = False,
    ) -> None:
        if metric not in METRICS:
            raise EsperError(f"metric is {metric!r}; {allowed(METRICS)}")
        self.model, self.body, self.policy, self.epochs = model, body, policy, epochs
        self.metric_name, self.evaluate = metric, evaluate
        self.history: list[StepResult] = []
        self._rules, self._facts, self._recorder = rules, facts, recorder
        self._flops_budget = flops_budget
        self._tracker = SignalTracker()
        self._sensing = Sensing(model, body.slot_config.slot_ids)
        self._optimizers = OptimizerLink(model, body)
        self._incubator = Incubator(model, body)
        self._followers = followers.Followers(model, body)
        self._last_op, self._last_success = LifecycleOp.WAIT, True
        self._hidden = None if policy is None else policy.initial_hidden(1)
        self._measured: list[list[Any]] | None = None
        """What `_applied` returned when the last metric was measured."""
        self._by_hand: list[LifecycleRecord] = []
        if isinstance(policy, decide.UserPolicy):
            policy.grower = self
        for slot in body:
            slot.sensing = self._sensing

    # -- the loop --------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Number of epochs that are over."""
        return len(self.history)

    def param_groups(
        self, host: Iterable[Any] | None = None, *, slots: Sequence[str] | None = None, **options: Any
    ) -> list[Group]:
        """Parameter groups for an optimizer: the host's, and one per slot, empty until a seed is there.
        `options` are those of the groups (lr, weight_decay …). `host` are parameters or groups of your own,
        `slots` the slots that this optimizer trains; all by default."""
        if isinstance(slots, str):
            raise EsperError(
                f"param_groups: slots is {slots!r}, must be a list of names, such as [{slots!r}]"
            )
        return self._optimizers.param_groups(host, slots, options)

    def track(self, optimizer: Any) -> None:
        """Follow an optimizer that does not inherit from `torch.optim.Optimizer`. All others are found."""
        self._optimizers.track(optimizer)

    def release(self, optimizer: Any) -> None:
        """Forget an optimizer that another one replaces. Without it, two that train one slot are an error."""
        self._optimizers.release(optimizer)

    def follow(self, average: nn.Module) -> None:
        """Let a copy of the model grow with it. An `AveragedModel` does so without being told."""
        self._followers.add(average)

    def loss(self, criterion: Callable[[Any], Tensor]) -> Tensor:
        """The loss of the seeds that incubate, to be added to your own: `criterion` of the model's output
        with each of them. 0 where there are none. A seed incubates if this was called in the epoch in which
        it germinated; otherwise it is grafted."""
        return self._incubator.loss(criterion)

    def step(
        self, metric: float | None = None, *, loss: float | None = None, loss_scale: float = 1.0
    ) -> StepResult:
        """End an epoch: measure, decide, grow.

        `metric` is your validation metric; it may be left out if `attach` was given `evaluate`. `loss` is
        your validation loss, if you have one beside it. With a gradient scaler pass its `get_scale()` as
        `loss_scale`."""
        with _growing():
            return self._step(metric, loss, loss_scale)

    def _step(self, metric: float | None, loss: float | None, loss_scale: float) -> StepResult:
        self._check_trained()
        now = distributed.from_first_rank(lambda: self._measure(metric, loss, loss_scale))
        distributed.check_equal(self.body)
        accuracy = self._as_accuracy(now.metric)
        measured = self._applied()
        with self._counted_if_decided():
            self.body.record_epoch(0, accuracy, contributions=now.contributions)
            gradients = now.measured.gradient_stats()
            if gradients is not None:
                self.body.record_gradients(gradients)
            signals = self._signals(accuracy, now)
            incubates = self._incubator.was_asked
            rules = replace(self._rules, epochs_needed=decide.epochs_needed(self.body, incubates=incubates))
            indices, decided = self._decide(rules, signals, now.measured.sensors)
            spec = parse_sampled_action(
                0,
                indices,
                self.body.reports(),
                rules,
                epochs_left=rules.max_epochs - signals.time.epoch,
                val_loss=0.0,
                val_accuracy=accuracy,
            )
            if spec.op is LifecycleOp.GERMINATE:
                tempo = decide.planting_epochs(spec.tempo_epochs, incubates=incubates)
                spec = replace(spec, tempo_epochs=tempo)
            init_seed = self._newborn_seed()
            applied = apply_action(self.body, spec, init_seed) if spec.veto is None else OpResult(False)
        self._measured = measured
        records = [*self._by_hand, *applied.records, *self.body.step_epoch()]
        self._last_op, self._last_success = spec.op, applied.done
        self._by_hand = []
        self._follow()
        acts = spec.op is not LifecycleOp.WAIT
        result = StepResult(
            epoch=self.epoch + 1,
            metric=now.metric,
            op=spec.op.name,
            slot=self._name(spec.slot_id) if acts else None,
            blueprint=spec.blueprint_id if spec.op is LifecycleOp.GERMINATE else None,
            executed=applied.done,
            changes=tuple(self._told(record) for record in records),
            contributions={self._name(slot): c for slot, c in now.contributions.items()},
            parameters=self.body.total_params(),
        )
        self.history.append(result)
        self._sensing.next_epoch()
        self._optimizers.next_epoch()
        self._incubator.next_epoch()
        if self._recorder is not None:
            named = [replace(record, slot_id=self._name(record.slot_id)) for record in records]
            effective = spec.op if applied.done else LifecycleOp.WAIT
            spec = replace(spec, slot_id=self._name(spec.slot_id))
            outcome = ActionOutcome(
                spec=spec, executed=applied.done, effective_op=effective, gate=applied.gate
            )
            self._recorder.step(self, result, signals, indices, decided, outcome, named)
        return result

    @contextmanager
    def _counted_if_decided(self) -> Iterator[None]:
        """An epoch whose decision is refused has not been counted: `step` may be called again."""
        seeds = [(seed, seed.metrics) for slot in self.body if (seed := slot.seeds[0]) is not None]
        tracker = self._tracker.state_dict()
        try:
            with self._policy_kept_on_error():
                yield
        except BaseException:
            for seed, metrics in seeds:
                seed.metrics = metrics
            self._tracker.load_state_dict(tracker)
            raise

    @contextmanager
    def _policy_kept_on_error(self) -> Iterator[None]:
        """An error inside leaves the policy's memory as it was."""
        memory = None if self.policy is None else self.policy.state()
        hidden = self._hidden
        try:
            yield
        except BaseException:
            if self.policy is not None and memory is not None:
                self.policy.load_state(memory)
            self._hidden = hidden
            raise

    def _check_trained(self) -> None:
        self.body.check_places(self.model)
        self._optimizers.check()
        trained = self._optimizers.steps or self._sensing.has_gradient
        if not trained and all(p.grad is None for p in self._optimizers.host_parameters()):
            raise EsperError(
                "step: the model has not been trained since it was attached: no backward pass and no "
                "optimizer step; call grower.step(metric) after an epoch of training"
            )

    def _measure(self, metric: float | None, loss: float | None, loss_scale: float) -> _Epoch:
        check_number("step", "loss_scale", loss_scale, low=1e-30)
        prefixes = {
            slot.slot_id: f"_esper.seed_slots.{slot.slot_id}." for slot in self.body if len(slot.banks)
        }
        measured = self._sensing.read(prefixes, self.body.host_params, loss_scale=loss_scale)
        contributions: dict[str, float] = {}
        if self.evaluate is not None:
            live = [s.slot_id for s in self.body if s.is_applied and s.seed(0).stage in LIVE_STAGES]
            full = self._evaluated() if metric is None or live else None
            metric = full if metric is None else metric
            for slot_id in live:
                without = self._evaluated_without([slot_id])
                assert full is not None
                if self._is_observable(min(full, without)):
                    contributions[slot_id] = self._as_accuracy(full) - self._as_accuracy(without)
        if metric is None:
            raise EsperError(
                "step: metric is missing; pass your validation metric, or attach with evaluate=…"
            )
        metric = self._checked(metric)
        if not self._is_observable(min([metric, *(result.metric for result in self.history)])):
            raise EsperError(
                f"step: metric is {metric:g}; a loss is observed as exp(−loss), which is the same 0 for all "
                f"losses above {LARGEST_LOSS:g}; divide it by a constant, such as the loss of the untrained "
                "model or the variance of the targets"
            )
        return _Epoch(metric, None if loss is None else _finite("loss", loss), contributions, measured)

    def _evaluated(self) -> float:
        """The user's metric of the model as it is now; training does not notice."""
        assert self.evaluate is not None
        with undisturbed(self.model), torch.no_grad():
            return self._checked(self.evaluate())

    def _evaluated_without(self, slot_ids: Sequence[str]) -> float:
        """The same without these seeds. A model may not work without them: a loss that is no finite number
        counts as infinite."""
        assert self.evaluate is not None
        with self.body.muted(slot_ids), undisturbed(self.model), torch.no_grad():
            metric = _number("metric", self.evaluate())
        if self.metric_name == "loss" and not math.isfinite(metric):
            return math.inf
        return self._checked(metric)

    def _is_observable(self, metric: float) -> bool:
        return self.metric_name == "accuracy" or metric <= LARGEST_LOSS

    def _checked(self, metric: Any) -> float:
        value = _finite("metric", metric)
        if self.metric_name == "accuracy" and not 0.0 <= value <= 1.0:
            raise EsperError(
                f"step: metric is {value:g}, an accuracy must lie in [0, 1]; divide percentages by 100, or "
                "attach with metric='loss' if smaller is better"
            )
        if value < 0.0:
            raise EsperError(f"step: metric is {value:g}, a loss must be 0 or more")
        return value

    def _as_accuracy(self, metric: float) -> float:
        """In points. A loss counts as the accuracy exp(−loss): the mean probability of the right answer, if
        it is a cross-entropy."""
        return 100.0 * (metric if self.metric_name == "accuracy" else math.exp(-metric))

    def _signals(self, accuracy: float, now: _Epoch) -> TrainingSignals:
        """What is not known is NaN, which is observed as unknown. To tell whether the model has settled, an
        accuracy alone stands for the loss −ln(accuracy)."""
        if self.metric_name == "loss":
            known: float | None = now.metric
        else:
            known = now.loss
        loss = -math.log(max(accuracy / 100.0, SMALLEST)) if known is None else known
        signals = self._tracker.update(
            self._time_left(),
            train_loss=math.nan,
            train_accuracy=math.nan,
            val_loss=loss,
            val_accuracy=accuracy,
        )
        if known is None:
            unknown = (math.nan,) * len(signals.loss_history)
            signals = replace(signals, val_loss=math.nan, loss_history=unknown)
        return signals

    def _time_left(self) -> TimeLeft:
        """At the end of this epoch; unknown numbers are NaN. Each epoch is taken to have as many steps as
        this one."""
        horizon = math.nan if self.epochs is None else self.epochs
        return TimeLeft.of_epochs(self.epoch + 1, horizon, self._optimizers.steps_of_epoch or math.nan)

    def _decide(
        self, rules: ActionRules, signals: TrainingSignals, sensors: Mapping[str, Sequence[float]]
    ) -> tuple[list[int], decide.Decided | None]:
        """Indices of all heads. The first rank decides for all."""
        policy = self.policy
        if policy is None:
            return decide.WAIT, None
        assert self._facts is not None, "measured for every policy"
        seen = decide.observe(
            self.body,
            rules,
            signals,
            sensors,
            facts=self._facts,
            flops_budget=self._flops_budget,
            learning_rate=self._optimizers.learning_rate(),
            last_op=self._last_op,
            last_success=self._last_success,
        )

        def act() -> tuple[list[int], decide.Decided]:
            step = policy.act(seen.observation, self._hidden, seen.masks, deterministic=True)
            self._hidden = step.hidden
            considered = {}
            if self._recorder is not None:
                measured = {name: np.array([values]) for name, values in sensors.items()}
                considered = Considered(
                    step,
                    seen.observation,
                    seen.masks,
                    measured,
                    [self.reports()],
                    self.body.names,
                    blueprints=[blueprint_id(index) for index in sorted(self._rules.blueprints)],
                ).fields(0)
            legal = seen.masks.op[0].tolist()
            return step.actions[0].tolist(), decide.Decided(step.op_probs[0].tolist(), legal, considered)

        return distributed.from_first_rank(act)

    def _follow(self) -> None:
        """Bring everything up to date that depends on the structure."""
        self._optimizers.sync()
        self._followers.sync()
        self._incubator.sync()

    # -- growth by hand --------------------------------------------------------------------------------------

    def germinate(self, slot: str, blueprint: str, **options: Any) -> None:
        """Plant a seed now. The model's output does not change. By default it is grafted: it trains with the
        model from the next batch on. `tempo_epochs` above 0 lets it incubate first, which needs
        `grower.loss`; `algorithm` chooses how it is blended in."""
        slot_id = self.body.slot_id(slot)
        self.body.check_places(self.model)
        if blueprint == "noop" or blueprint not in blueprint_names(self.body.slot(slot_id).topology):
            names = decide.growable_names(self.body)
            raise EsperError(f"blueprint {blueprint!r} cannot grow in slot {slot!r}; {allowed(names)}")
        options = {"tempo_epochs": 0, "init_seed": self._newborn_seed(), **options}
        with _growing():
            self._done(self.body.germinate(slot_id, blueprint, **options))

    def prune(self, slot: str) -> None:
        """Remove a seed now. Its slot rests for an epoch before it can grow again."""
        self._done(self.body.prune(self.body.slot_id(slot)))

    def fossilize(self, slot: str) -> None:
        """Make a holding seed permanent."""
        result = self.body.fossilize(self.body.slot_id(slot))
        self._done(result)
        if not result.done:
            assert result.gate is not None
            reasons = ", ".join(failure.reason.value for failure in result.gate.failures)
            raise TransitionError(
                f"slot {slot!r}: the seed cannot become permanent yet ({reasons}); with evaluate=… its "
                "contribution is measured by grower.step"
            )

    def _done(self, result: OpResult) -> None:
        self._by_hand += result.records
        self._follow()

    def _newborn_seed(self) -> int:
        return stream_seed(self._rules.root_seed, "germination", 0, 0, self.body.germinations[0])

    @contextmanager
    def without(self, slot: str) -> Iterator[None]:
        """Inside, the model runs without this slot's seed."""
        with self.body.muted([self.body.slot_id(slot)]):
            yield

    def reports(self) -> dict[str, SeedStateReport]:
        """The seeds by slot: stage, age, alpha, contribution, gradients."""
        return {self._name(slot_id): report for slot_id, report in self.body.reports().items()}

    @property
    def accuracies(self) -> list[float]:
        """The metric of each epoch, as points of accuracy."""
        return [self._as_accuracy(result.metric) for result in self.history]

    def committed_accuracy(self) -> float | None:
        """Accuracy in points with permanent seeds only; None if that was not measured."""
        live = [s.slot_id for s in self.body if s.is_applied and s.seed(0).stage in LIVE_STAGES]
        if not live and self.history and self._applied() == self._measured:
            return self.accuracies[-1]
        return None if self.evaluate is None else self._as_accuracy(self._evaluated_without(live))

    def _applied(self) -> list[list[Any]]:
        """The seeds that change the output now, each with its alpha."""
        seeds = [slot.seed(0) for slot in self.body if slot.is_applied]
        return [[seed.seed_id, seed.alpha.alpha] for seed in seeds]

    def count_fossils(self) -> int:
        return sum(report.stage is SeedStage.FOSSILIZED for report in self.body.reports().values())

    def _name(self, slot_id: str) -> str:
        slot = self.body.seed_slots[slot_id]
        return slot.name  # type: ignore[return-value]

    def _told(self, record: LifecycleRecord) -> str:
        unmeasured = ", unmeasured" if record.kind == "fossilized" and record.contribution is None else ""
        return f"{record.blueprint_id} in {self._name(record.slot_id)} {record.kind.value}{unmeasured}"

    # -- keeping ---------------------------------------------------------------------------------------------

    def rewrap(self, ddp: DistributedDataParallel) -> DistributedDataParallel:
        """The DDP wrapper for the model as it is now: the same object if nothing has grown since it was made,
        else a new one with the same settings."""
        return distributed.rewrap(ddp, self.model)

    def export(self) -> nn.Module:
        """A copy of the grown model without Esper: plain torch modules, for pickling, serving and training
        on."""
        return export_model(self.model, self.body)

    def save(self, path: str | Path) -> None:
        """Write structure and weights to a directory, for `esper.load`."""
        saving.save_grown(path, self.model, self.body, [asdict(result) for result in self.history])

    def state_dict(self) -> dict[str, Any]:
        """Everything but weights: those are in the model's own state_dict, under `_esper.`."""
        return {
            "version": STATE_VERSION,
            "structure": self.body.structure(),
            "tracker": self._tracker.state_dict(),
            "policy_kind": decide.kind_of(self.policy),
            "policy": None if self.policy is None else self.policy.state(),
            "metric": self.metric_name,
            "measured": self._measured,
            "hidden": None if self._hidden is None else tuple(t.clone() for t in self._hidden),
            "sensing": self._sensing.state(),
            "last_op": int(self._last_op),
            "last_success": self._last_success,
            "history": [asdict(result) for result in self.history],
            "recorder": None if self._recorder is None else self._recorder.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Rebuild the structure and go on. Call it before the `load_state_dict` of model and optimizer. A
        state that does not fit this grower changes nothing."""
        self._check_state(state)
        history = [saving.as_result(StepResult, entry) for entry in state["history"]]
        tracker = SignalTracker()
        tracker.load_state_dict(state["tracker"])
        with self._policy_kept_on_error():
            if self.policy is not None:
                decide.load_policy_state(self.policy, state["policy"])
                self._hidden = state["hidden"]
            self.body.restore(state["structure"], "grower state")
        self._tracker, self.history, self._measured = tracker, history, state["measured"]
        self._sensing.load_state(state["sensing"])
        self._last_op, self._last_success = LifecycleOp(state["last_op"]), bool(state["last_success"])
        if self._recorder is not None and state["recorder"] is not None:
            self._recorder.resume(state["recorder"], self.epoch)
        self._follow()

    def _check_state(self, state: Mapping[str, Any]) -> None:
        if "version" not in state:
            raise EsperError("this is no state of a grower: load what grower.state_dict() has returned")
        if state["version"] != STATE_VERSION:
            raise EsperError(
                f"grower state: version is {state['version']!r}, this Esper reads version {STATE_VERSION} "
                "(version 1 does not name its policy and metric); go on with the Esper that saved it"
            )
        missing = sorted(self.state_dict().keys() - state.keys())
        if missing:
            raise EsperError(f"this is no state of a grower: fields {', '.join(missing)} are missing")
        for name, saved, here in (
            ("policy", state["policy_kind"], decide.kind_of(self.policy)),
            ("metric", state["metric"], self.metric_name),
        ):
            if saved != here:
                raise EsperError(
                    f"grower state: {name} was {saved}, this grower has {here}; attach with the {name} of "
                    "the run"
                )

    def close(self) -> None:
        """End the record of the run, if there is one."""
        if self._recorder is not None:
            self._recorder.close(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Grower:
        """The same grower: a copy of a module that holds it, such as an average of its weights, is not grown
        by a second one."""
        return self


@contextmanager
def _growing() -> Iterator[None]:
    """Frameworks call back under no_grad or inference_mode, and weights that are made there cannot learn."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise EsperError(f"step: {name} is {value!r}, must be a number") from None


def _finite(name: str, value: Any) -> float:
    number = _number(name, value)
    if not math.isfinite(number):
        raise EsperError(
            f"step: {name} is {number}; the training has diverged or the {name} was computed on nothing. "
            "Lower the learning rate, or go back to a checkpoint; nothing has grown or changed"
        )
    return number
