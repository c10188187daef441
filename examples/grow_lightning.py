"""Lightning: a module, its trainer, and a callback that grows it."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import esper  # esper
from data import loaders
from esper.grower.lightning import GrowthCallback  # esper


class Digits(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
        self.layer2 = nn.Sequential(nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(128, 10)
        self.grower = None

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer2(self.layer1(x)).flatten(1))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.log("val_acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        params = self.parameters()
        params = self.grower.param_groups()  # esper
        return torch.optim.AdamW(params, lr=1e-2)


def main(epochs: int = 8, train: int = 1200, resume: str | None = None, **options: object) -> nn.Module:
    L.seed_everything(0, verbose=False)
    train_batches, val_batches = loaders("digits", train)
    model = Digits()
    callbacks = []
    example = next(iter(val_batches))[0]  # esper
    slots = ["layer1", "layer2"]  # esper
    model.grower = esper.attach(model, slots, example, policy="periodic", epochs=epochs)  # esper
    callbacks.append(GrowthCallback(model.grower, monitor="val_acc"))  # esper
    trainer = L.Trainer(max_epochs=epochs, callbacks=callbacks, logger=False, accelerator="cpu", **options)
    trainer.fit(model, train_batches, val_batches, ckpt_path=resume, weights_only=resume is not None or None)
    print(*model.grower.history, sep="\n")  # esper
    return model


if __name__ == "__main__":
    main()
