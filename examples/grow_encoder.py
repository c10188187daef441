"""torch's own nn.TransformerEncoder reads the rows of a digit as eight tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import esper  # esper
from data import loaders


class RowReader(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.position = nn.Parameter(torch.zeros(8, width))
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x.squeeze(1)) + self.position).mean(1))


def main(epochs: int = 10, train: int = 1200) -> nn.Module:
    torch.manual_seed(0)
    train_batches, val_batches = loaders("digits", train)
    model = RowReader()
    params = model.parameters()
    example = next(iter(val_batches))[0]  # esper
    grower = esper.attach(model, ["encoder.layers.*"], example, policy="periodic", epochs=epochs)  # esper
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
