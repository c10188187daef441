"""The callbacks for the Trainer of transformers and for Lightning: when they grow, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_model
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.leyline import EsperError
from grower_helpers import SmallCNN, digits, make, same

# Other people's packages warn about their own future.
pytestmark = pytest.mark.filterwarnings("ignore")
SLOTS = ["net.layer1", "net.layer2"]
PLANT = [(1, "net.layer1", "conv_light")]


def seeds(model: nn.Module) -> set[str]:
    """Names of the slots in which a seed has weights."""
    return {name.split(".")[2] for name in model.state_dict() if name.startswith("_esper.")}


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


# -- transformers --------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """What the Trainer calls: named inputs, and a dict with the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = SmallCNN()

    def forward(self, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(pixels)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def images(count: int) -> list[dict[str, Tensor]]:
    return [{"pixels": x, "labels": y} for x, y in zip(*digits(count), strict=True)]


class Run:
    """A model, its grower, the callback and the Trainer. An epoch has two steps."""

    def __init__(
        self,
        path: Path,
        *,
        schedule: Any = PLANT,
        metric: str | None = None,
        eval_dataset: Any = None,
        record: Path | None = None,
        callbacks: Any = (),
        **options: Any,
    ) -> None:
        transformers = pytest.importorskip("transformers")
        pytest.importorskip("accelerate")
        from esper.grower.transformers import GrowthCallback

        self.model = make(Classifier)
        x, y = digits()
        example = {"pixels": x[:2], "labels": y[:2]}
        self.grower = esper.attach(self.model, SLOTS, example, policy=schedule, metric="loss", record=record)
        self.callback = GrowthCallback(self.grower, metric)
        settings: dict[str, Any] = {
            "output_dir": str(path),
            "num_train_epochs": 2,
            "per_device_train_batch_size": 32,
            "eval_strategy": "epoch",
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
        }
        self.trainer = transformers.Trainer(
            self.model,
            transformers.TrainingArguments(**{**settings, **options}),
            train_dataset=images(64),
            eval_dataset=eval_dataset or images(32),
            optimizers=(torch.optim.AdamW(self.grower.param_groups(), lr=1e-2), None),
            callbacks=[self.callback, *callbacks],
        )


def test_transformers_evaluations_outside_of_training_change_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, schedule=[(3, "net.layer1", "conv_light")])  # one epoch after the training
    run.trainer.evaluate()
    run.trainer.train()
    assert run.grower.epoch == 2
    before = run.grower.state_dict()
    run.trainer.evaluate()
    assert same(run.grower.state_dict(), before)
    run.trainer.evaluate(images(16), metric_key_prefix="test")
    assert same(run.grower.state_dict(), before)
    assert not seeds(run.model)


def test_transformers_an_interrupted_training_does_not_grow_later(tmp_path: Path) -> None:
    run = Run(tmp_path)

    def fail_in_the_second_epoch(*_: Any) -> None:
        if run.model.training and run.grower.epoch == 1:
            raise KeyboardInterrupt

    hook = run.model.register_forward_hook(fail_in_the_second_epoch)
    with pytest.raises(KeyboardInterrupt):
        run.trainer.train()
    hook.remove()
    run.trainer.evaluate()
    assert run.grower.epoch == 1


def test_transformers_only_evaluations_after_training_steps_are_epochs(tmp_path: Path) -> None:
    Run(tmp_path, save_strategy="epoch").trainer.train()
    again = Run(tmp_path, num_train_epochs=3, eval_on_start=True)
    again.trainer.train(resume_from_checkpoint=again.callback.resume(tmp_path / "checkpoint-4"))
    assert [result.epoch for result in again.grower.history] == [1, 2, 3]


def test_transformers_grows_by_one_of_several_sets(tmp_path: Path) -> None:
    sets = {"a": images(32), "b": images(48)}
    run = Run(tmp_path, metric="eval_b_loss", eval_dataset=sets)
    run.trainer.train()
    logged = [entry["eval_b_loss"] for entry in run.trainer.state.log_history if "eval_b_loss" in entry]
    assert [result.metric for result in run.grower.history] == logged
    assert len(logged) == 2
    assert seeds(run.model) == {"r0c0"}


def test_transformers_ignores_other_evaluations_while_training(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    class TestEachEpoch(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            run.trainer.evaluate(images(16), metric_key_prefix="test")
            control.should_evaluate = state.epoch == 2

    run = Run(tmp_path, callbacks=[TestEachEpoch()])
    run.trainer.train()
    assert run.grower.epoch == 1


@pytest.mark.parametrize("epochs", [1, 3])
def test_transformers_names_a_metric_that_was_not_measured(tmp_path: Path, epochs: int) -> None:
    run = Run(tmp_path, eval_dataset={"a": images(32), "b": images(48)}, num_train_epochs=epochs)
    with pytest.raises(EsperError, match=r"metric is 'eval_loss', .* allowed: .*eval_a_loss.*eval_b_loss"):
        run.trainer.train()
    assert run.trainer.state.global_step == 2  # at the end of the first epoch
    assert run.grower.epoch == 0


def test_transformers_refuses_to_load_the_best_model_and_it_can_be_loaded_later(tmp_path: Path) -> None:
    # With the largest loss as the best one, the best epoch is the first: before the second seed.
    options = {"save_strategy": "epoch", "metric_for_best_model": "eval_loss", "greater_is_better": True}
    schedule = [*PLANT, (2, "net.layer2", "norm")]
    refused = Run(tmp_path, **options, load_best_model_at_end=True)
    with pytest.raises(EsperError, match=r"load_best_model_at_end is True: .* set it to False"):
        refused.trainer.train()
    run = Run(tmp_path, schedule=schedule, record=tmp_path / "run", **options)
    run.trainer.train()
    run.grower.close()
    assert seeds(run.model) == {"r0c0", "r0c1"}
    recorded = files(tmp_path / "run")
    checkpoint = run.trainer.state.best_model_checkpoint
    run.callback.rebuild(checkpoint)
    load_model(run.model, f"{checkpoint}/model.safetensors")
    assert seeds(run.model) == {"r0c0"}
    assert run.grower.epoch == 1
    assert run.trainer.evaluate()["eval_loss"] == pytest.approx(run.trainer.state.best_metric)
    assert files(tmp_path / "run") == recorded


# -- Lightning -----------------------------------------------------------------------------------------------


def lightning(path: Path, *, record: Path | None = None, averages: bool = False, epochs: int = 4) -> Any:
    """A trainer and its module, as in a new process. The checkpoint of each epoch is kept."""
    L = pytest.importorskip("lightning")
    from esper.grower.lightning import GrowthCallback

    class Module(L.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = SmallCNN()
            x, _ = digits()
            slots = ["layer1", "layer2"]
            schedule = [(1, "layer1", "conv_light"), (3, "layer2", "norm")]
            self.grower = esper.attach(self.net, slots, x[:2], policy=schedule, epochs=4, record=record)
            self.restored: list[int] = []

        def training_step(self, batch: Any) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any) -> None:
            self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())
            self.log("loss", F.cross_entropy(self.net(batch[0]), batch[1]))

        test_step = validation_step

        def predict_step(self, batch: Any) -> Tensor:
            return self.net(batch[0])

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.restored.append(checkpoint["epoch"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.grower.param_groups(), lr=1e-2)

    module = make(Module)
    callbacks = [
        GrowthCallback(module.grower, monitor="accuracy"),
        L.pytorch.callbacks.ModelCheckpoint(path, "{epoch}", save_top_k=-1),
    ]
    if averages:
        callbacks.append(L.pytorch.callbacks.EMAWeightAveraging(decay=0.5))
    trainer = L.Trainer(
        max_epochs=epochs,
        callbacks=callbacks,
        logger=False,
        accelerator="cpu",
        default_root_dir=path,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    return trainer, module


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*digits(64)), batch_size=32)


def grown(module: Any) -> set[str]:
    return seeds(module.net)


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_lightning_uses_a_grown_checkpoint_in_a_new_process(tmp_path: Path, stage: str) -> None:
    record, checkpoint = tmp_path / "run", tmp_path / "epoch=1.ckpt"
    trainer, module = lightning(tmp_path, record=record)
    trainer.fit(module, loader(), loader())
    assert grown(module) == {"r0c0", "r0c1"}
    expected = getattr(trainer, stage)(module, loader(), ckpt_path=checkpoint)
    recorded = files(record)

    trainer, module = lightning(tmp_path, record=record)
    result = getattr(trainer, stage)(module, loader(), ckpt_path=checkpoint)
    assert same(result, expected)
    assert module.grower.epoch == 2
    assert grown(module) == {"r0c0"}
    assert module.restored == [1]
    assert files(record) == recorded


def test_lightning_says_which_checkpoints_hold_no_growth(tmp_path: Path) -> None:
    trainer, module = lightning(tmp_path, epochs=2)
    trainer.fit(module, loader(), loader())
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    trainer, module = lightning(tmp_path)
    with pytest.raises(EsperError, match=r"holds no state of GrowthCallback: .* save_weights_only=True"):
        trainer.test(module, loader(), ckpt_path=tmp_path / "weights.ckpt")


def test_lightning_tests_a_checkpoint_from_before_esper(tmp_path: Path) -> None:
    trainer, module = lightning(tmp_path)
    (expected,) = trainer.test(module, loader())
    torch.save(
        {"state_dict": module.state_dict(), "epoch": 0, "pytorch-lightning_version": "2.0"},
        tmp_path / "plain.ckpt",
    )
    trainer, module = lightning(tmp_path)
    (result,) = trainer.test(module, loader(), ckpt_path=tmp_path / "plain.ckpt")
    assert result == expected
    assert module.grower.epoch == 0


def test_lightning_averages_a_recorded_run_and_resumes_it(tmp_path: Path) -> None:
    whole = averaged(tmp_path / "whole")
    averaged(tmp_path / "half", epochs=3).grower.close()
    again = averaged(tmp_path / "half", resume=True)
    assert again.grower.history == whole.grower.history
    assert same(again.state_dict(), whole.state_dict())


def averaged(path: Path, *, epochs: int = 4, resume: bool = False) -> Any:
    """A recorded run with an average of the weights, which grows along and copies no grower."""
    trainer, module = lightning(path, record=path / "run", averages=True, epochs=epochs)
    trainer.fit(module, loader(), loader(), ckpt_path=path / "epoch=2.ckpt" if resume else None)
    (average,) = [c._average_model for c in trainer.callbacks if hasattr(c, "_average_model")]
    assert isinstance(average, AveragedModel)
    assert average.module.grower is module.grower
    assert seeds(average.module.net) == grown(module) == {"r0c0", "r0c1"}
    return module
