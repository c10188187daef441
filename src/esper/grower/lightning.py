"""Growth in Lightning: `Trainer(callbacks=[GrowthCallback(grower, monitor="val_acc")])`.

The module's `configure_optimizers` builds its optimizer from `grower.param_groups()`. Checkpoints of the
trainer hold the grower's state; a resumed trainer rebuilds the structure before it loads weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from esper.grower.grower import Grower
from esper.grower.places import ESPER
from esper.leyline import EsperError, allowed

LoadHook = Callable[[dict[str, Any]], None]


class GrowthCallback(Callback):
    """Calls `grower.step` after each validation of `trainer.fit`."""

    def __init__(self, grower: Grower, monitor: str) -> None:
        """`monitor` is the name of the logged validation metric that `grower.step` is given."""
        self.grower, self.monitor = grower, monitor
        self._is_restored = self._is_fitting = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Weights and optimizer state need the structure, and Lightning restores callbacks after them. The
        only thing that it calls earlier with the checkpoint is the module's own hook, so this goes first."""
        self._is_fitting = stage == "fit"
        hook: LoadHook = pl_module.on_load_checkpoint
        own = hook.own if isinstance(hook, _RebuildFirst) else hook
        vars(pl_module)["on_load_checkpoint"] = _RebuildFirst(self._rebuild, own)

    def _rebuild(self, checkpoint: dict[str, Any]) -> None:
        """Give the module the structure of a checkpoint."""
        states = checkpoint.get("callbacks", {})
        if self.state_key in states:
            # A test does not continue the run, so it must not cut the record that belongs to it.
            continued = {} if self._is_fitting else {"recorder": None}
            self.grower.load_state_dict({**states[self.state_key], **continued})
            self._is_restored = True
        elif self._is_fitting or any(ESPER in name.split(".") for name in checkpoint["state_dict"]):
            raise EsperError(
                f"the checkpoint holds no state of {self.state_key}: it was saved without growth or with "
                "save_weights_only=True; save it by a trainer that has this callback"
            )

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
            raise EsperError("growth must be restored before the weights; pass ckpt_path to the trainer")


class _RebuildFirst:
    """The hook `on_load_checkpoint` of a module that grows: rebuilds the structure, then calls the module's
    own hook. A copy of the module, such as an average of its weights, gets only its own."""

    def __init__(self, rebuild: LoadHook, own: LoadHook) -> None:
        self.rebuild, self.own = rebuild, own

    def __call__(self, checkpoint: dict[str, Any]) -> None:
        self.rebuild(checkpoint)
        self.own(checkpoint)

    def __deepcopy__(self, memo: dict[int, Any]) -> LoadHook:
        return copy.deepcopy(self.own, memo)
