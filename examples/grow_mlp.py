"""A plain loop on a multilayer perceptron. The lines marked `# esper` are all that growing takes."""

import torch
import torch.nn.functional as F
from torch import nn

import esper  # esper
from data import loaders


def main(epochs: int = 12, train: int = 1200) -> nn.Module:
    torch.manual_seed(0)
    train_batches, val_batches = loaders("digits", train)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 10)
    )
    params = model.parameters()
    grower = esper.attach(model, ["1", "3"], torch.zeros(2, 64), policy="periodic", epochs=epochs)  # esper
    params = grower.param_groups()  # esper
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=epochs * len(train_batches))
    for epoch in range(epochs):
        model.train()
        for x, y in train_batches:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        model.eval()
        with torch.no_grad():
            hits = sum((model(x).argmax(1) == y).sum().item() for x, y in val_batches)
        accuracy = hits / len(val_batches.dataset)
        print(f"epoch {epoch + 1}: {accuracy:.1%}")
        print(grower.step(accuracy))  # esper
    grower.save("runs/grown_mlp")  # esper
    print(grower.export())  # esper
    return model


if __name__ == "__main__":
    main()
