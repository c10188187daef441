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
    """Calls `grower.step` after each evaluation."""

    def __init__(self, grower: Grower, metric: str | None = None) -> None:
        """`metric` is the evaluation's metric that `grower.step` is given: by default `eval_loss` or
        `eval_accuracy`, as the grower was attached."""
        self.grower, self.metric = grower, metric or f"eval_{grower.metric_name}"

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if metrics is None or self.metric not in metrics:
            raise EsperError(f"metric is {self.metric!r}; {allowed(metrics or ['nothing was evaluated'])}")
        if state.global_step:  # an evaluation before training measures nothing that growth can use
            loss = metrics.get("eval_loss") if self.grower.metric_name == "accuracy" else None
            self.grower.step(metrics[self.metric], loss=loss)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        assert args.output_dir is not None
        directory = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if state.is_world_process_zero:
            torch.save(self.grower.state_dict(), directory / STATE)

    def resume(self, checkpoint: str | Path) -> str:
        """Rebuild the structure of a checkpoint; returns it for `trainer.train(resume_from_checkpoint=…)`."""
        self.grower.load_state_dict(torch.load(Path(checkpoint) / STATE, weights_only=True))
        return str(checkpoint)
