"""Growth in Lightning: `Trainer(callbacks=[GrowthCallback(grower, monitor="val_acc")])`.

The module's `configure_optimizers` builds its optimizer from `grower.param_groups()`. Checkpoints of the
trainer hold the grower's state; a resumed trainer rebuilds the structure before it loads weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from esper.grower.grower import Grower
from esper.leyline import EsperError, allowed


class GrowthCallback(Callback):
    """Calls `grower.step` after each validation."""

    def __init__(self, grower: Grower, monitor: str) -> None:
        """`monitor` is the name of the logged validation metric that `grower.step` is given."""
        self.grower, self.monitor = grower, monitor
        self._is_restored = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Weights and optimizer state need the structure, and Lightning restores callbacks after them. The
        only thing that it calls earlier with the checkpoint is the module's own hook, so this goes first."""
        if stage == "fit":
            vars(pl_module)["on_load_checkpoint"] = partial(self._rebuild, pl_module.on_load_checkpoint)

    def _rebuild(self, then: Callable[[dict[str, Any]], None], checkpoint: dict[str, Any]) -> None:
        states = checkpoint.get("callbacks", {})
        if self.state_key not in states:
            raise EsperError(
                f"the checkpoint holds no state of {self.state_key}: it was saved without growth"
            )
        self.grower.load_state_dict(states[self.state_key])
        self._is_restored = True
        then(checkpoint)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        metrics = trainer.callback_metrics
        if self.monitor not in metrics:
            raise EsperError(
                f"monitor is {self.monitor!r}, which the module has not logged; "
                + allowed(sorted(metrics) or ["nothing was logged"])
            )
        self.grower.step(float(metrics[self.monitor]))

    def state_dict(self) -> dict[str, Any]:
        return self.grower.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not self._is_restored:
            raise EsperError("growth must be restored before the weights; pass ckpt_path to trainer.fit")
