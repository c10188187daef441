"""The vision transformer of transformers, with random weights, on handwritten digits."""

import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

import esper  # esper
from data import loaders


def main(epochs: int = 10, train: int = 1200) -> nn.Module:
    torch.manual_seed(0)
    train_batches, val_batches = loaders("digits", train)
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=24,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_labels=10,
    )
    model = ViTForImageClassification(config)
    params = model.parameters()
    example = {"pixel_values": next(iter(val_batches))[0]}  # esper
    blocks = [name for name, m in model.named_modules() if type(m).__name__ == "ViTLayer"]  # esper
    grower = esper.attach(model, blocks, example, policy="periodic", epochs=epochs)  # esper
    params = grower.param_groups()  # esper
    optimizer = torch.optim.AdamW(params, lr=3e-3)
    for epoch in range(epochs):
        model.train()
        for x, y in train_batches:
            model(pixel_values=x, labels=y).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
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
