"""The ResNet of transformers (basic blocks), with random weights, on CIFAR-10 (`esper data get cifar10`)."""

import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

import esper  # esper
from data import loaders


def main(epochs: int = 10, train: int = 10000, dataset: str = "cifar10") -> nn.Module:
    torch.manual_seed(0)
    train_batches, val_batches = loaders(dataset, train)
    channels = next(iter(val_batches))[0].shape[1]
    config = ResNetConfig(
        num_channels=channels,
        embedding_size=8,
        hidden_sizes=[8, 16, 32],
        depths=[1, 1, 1],
        layer_type="basic",
        downsample_in_first_stage=False,
        num_labels=10,
    )
    model = ResNetForImageClassification(config)
    params = model.parameters()
    example = {"pixel_values": next(iter(val_batches))[0][:8]}  # esper
    slots = ["resnet.encoder.stages.*"]  # esper
    grower = esper.attach(model, slots, example, policy="periodic", epochs=epochs)  # esper
    params = grower.param_groups()  # esper
    optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=epochs * len(train_batches))
    for epoch in range(epochs):
        model.train()
        for x, y in train_batches:
            model(pixel_values=x, labels=y).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        model.eval()
        with torch.no_grad():
            hits = sum((model(pixel_values=x).logits.argmax(1) == y).sum().item() for x, y in val_batches)
        accuracy = hits / len(val_batches.dataset)
        print(f"epoch {epoch + 1}: {accuracy:.1%}")
        print(grower.step(accuracy))  # esper
    print(grower.export())  # esper
    return model


if __name__ == "__main__":
    main()
