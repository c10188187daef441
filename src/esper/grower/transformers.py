"""Growth in the Trainer of transformers: `Trainer(…, callbacks=[GrowthCallback(grower)])`.

The trainer is given an optimizer that was built from `grower.param_groups()`; it makes the scheduler itself.
Each checkpoint gets a file with the grower's state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from esper.grower.grower import Grower
from esper.leyline import EsperError, allowed

STATE = "grower.pt"


class GrowthCallback(TrainerCallback):
    """Calls `grower.step` after each evaluation of `trainer.train`. Other evaluations change nothing."""

    def __init__(self, grower: Grower, metric: str | None = None) -> None:
        """`metric` is the evaluation's metric that `grower.step` is given: by default `eval_loss` or
        `eval_accuracy`, as the grower was attached. Evaluations without it are passed over."""
        self.grower, self.metric = grower, metric or f"eval_{grower.metric_name}"
        self._is_due = False
        """The next evaluation measures what the last training step left, and nothing has grown since."""
        self._evaluated: set[str] = set()
        """Names of all metrics in this training."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.load_best_model_at_end:
            raise EsperError(
                "load_best_model_at_end is True: the Trainer would load the weights of an earlier structure "
                "into the structure at the end of training; set it to False, keep metric_for_best_model and "
                "save_strategy, and after training call callback.rebuild(checkpoint) and load the weights of "
                "this checkpoint, where checkpoint is trainer.state.best_model_checkpoint"
            )
        self._is_due, self._evaluated = False, set()

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if any(name.startswith("eval_") for name in self._evaluated):  # the Trainer's own evaluation is over
            self._check_metric()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._is_due = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._is_due = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._is_due = False
        self._check_metric()

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if not self._is_due or metrics is None:
            return
        self._evaluated |= metrics.keys()
        if self.metric in metrics:
            self._is_due = False
            loss = metrics.get("eval_loss") if self.grower.metric_name == "accuracy" else None
            self.grower.step(metrics[self.metric], loss=loss)

    def _check_metric(self) -> None:
        if self._evaluated and self.metric not in self._evaluated:
            raise EsperError(
                f"metric is {self.metric!r}, which no evaluation has measured; "
                + allowed(sorted(self._evaluated))
            )

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        assert args.output_dir is not None
        directory = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if state.is_world_process_zero:
            torch.save(self.grower.state_dict(), directory / STATE)

    def resume(self, checkpoint: str | Path) -> str:
        """Rebuild the structure of a checkpoint; returns it for `trainer.train(resume_from_checkpoint=…)`."""
        self.grower.load_state_dict(_state(checkpoint))
        return str(checkpoint)

    def rebuild(self, checkpoint: str | Path) -> None:
        """Rebuild the structure of a checkpoint whose weights you load next, to use them without training on.
        A record of the run stays as it is."""
        self.grower.load_state_dict({**_state(checkpoint), "recorder": None})


def _state(checkpoint: str | Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(Path(checkpoint) / STATE, weights_only=True)
    return state
