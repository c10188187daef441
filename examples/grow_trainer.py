"""The Trainer of transformers: GPT-2 on characters of English text, grown by a callback."""

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import esper  # esper
from data import text
from esper.grower.transformers import GrowthCallback  # esper


def main(epochs: int = 4, train: int = 512, resume: str | None = None, **options: object) -> nn.Module:
    torch.manual_seed(0)
    train_windows, val_windows, alphabet = text(train=train)
    train_set, val_set = (
        [{"input_ids": w, "labels": w} for w in part] for part in (train_windows, val_windows)
    )
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
    settings = {
        "output_dir": "runs/gpt2",
        "num_train_epochs": epochs,
        "per_device_train_batch_size": 32,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    params, callbacks = model.parameters(), []
    example = {"input_ids": val_windows[:2]}  # esper
    slots = ["transformer.h.*"]  # esper
    grower = esper.attach(model, slots, example, policy="periodic", metric="loss", epochs=epochs)  # esper
    params, callbacks = grower.param_groups(), [GrowthCallback(grower)]  # esper
    optimizer = torch.optim.AdamW(params, lr=3e-3)
    trainer = Trainer(
        model,
        TrainingArguments(**{**settings, **options}),
        train_dataset=train_set,
        eval_dataset=val_set,
        optimizers=(optimizer, None),
        callbacks=callbacks,
    )
    resume = resume and callbacks[0].resume(resume)  # esper
    trainer.train(resume_from_checkpoint=resume)
    print(*grower.history, sep="\n")  # esper
    return model


if __name__ == "__main__":
    main()
