"""GPT-2 of transformers, with random weights, on characters of English text. The metric is the loss."""

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import esper  # esper
from data import text


def main(epochs: int = 6, train: int = 512) -> nn.Module:
    torch.manual_seed(0)
    train_windows, val_windows, alphabet = text(train=train)
    config = GPT2Config(
        vocab_size=alphabet,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=2,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config)
    params = model.parameters()
    example = {"input_ids": val_windows[:2]}  # esper
    slots = ["transformer.h.*"]  # esper
    grower = esper.attach(model, slots, example, policy="periodic", metric="loss", epochs=epochs)  # esper
    params = grower.param_groups()  # esper
    optimizer = torch.optim.AdamW(params, lr=3e-3)
    for epoch in range(epochs):
        model.train()
        for batch in train_windows[torch.randperm(len(train_windows))].split(32):
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            loss = model(input_ids=val_windows, labels=val_windows).loss.item()
        print(f"epoch {epoch + 1}: loss {loss:.3f}")
        print(grower.step(loss))  # esper
    print(grower.export())  # esper
    return model


if __name__ == "__main__":
    main()
