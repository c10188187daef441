"""MONAI's resnet10 in two dimensions, with random weights, on handwritten digits."""

import torch
import torch.nn.functional as F
from monai.networks.nets import resnet10
from torch import nn

import esper  # esper
from data import loaders


def main(epochs: int = 8, train: int = 1200) -> nn.Module:
    torch.manual_seed(0)
    train_batches, val_batches = loaders("digits", train)
    model = resnet10(
        spatial_dims=2,
        n_input_channels=1,
        num_classes=10,
        widen_factor=0.125,
        conv1_t_size=3,
        conv1_t_stride=1,
        no_max_pool=True,
    )
    params = model.parameters()
    example = next(iter(val_batches))[0]  # esper
    slots = ["layer1", "layer2", "layer3"]  # esper
    grower = esper.attach(model, slots, example, policy="periodic", epochs=epochs)  # esper
    params = grower.param_groups()  # esper
    optimizer = torch.optim.AdamW(params, lr=3e-3)
    for epoch in range(epochs):
        model.train()
        for x, y in train_batches:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            hits = sum((model(x).argmax(1) == y).sum().item() for x, y in val_batches)
        accuracy = hits / len(val_batches.dataset)
        print(f"epoch {epoch + 1}: {accuracy:.1%}")
        print(grower.step(accuracy))  # esper
    print(grower.export())  # esper
    return model


if __name__ == "__main__":
    main()
