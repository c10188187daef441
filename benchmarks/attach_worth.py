"""Is growth worth it in a user's own loop? One network, grown by rules and learned policies, against every
static network of its ladder, at equal training FLOPs.

`python -m benchmarks.attach_worth cifar` trains a narrow residual CNN on CIFAR-10, `strided` a plain one
without residuals for six times as long, `text` a small GPT on characters, `vit` the vision transformer of
transformers on handwritten digits. Variants: every rung of the ladder (nothing; a light or a heavy blueprint
in each slot alone and in all, from the start), `periodic`, `plateau`, `heuristic`, and each policy given by
`--policy`. `light all@6` is a rung that is planted after epoch 6; `final of P` has the seeds from the start
that the policy P kept in the run with this random seed. All have the same random seeds, which fix
initial weights and batches. An epoch is an equal part of the budget, not of the data, so a larger network
takes fewer steps. Policies are told so, and that parameters cost nothing. Charged: training passes, and
evaluations that measure contributions. Not charged: one validation per epoch, which all variants have, and
sensors.

It prints the test metric and differences to growing nothing, to the best rung, to the largest one and to the
policy's own final network, with 95 % intervals. The best rung is chosen for each random seed by the mean of
the others, so that luck is not rewarded. With `--out` every run is written when it ends, and a run that the
file has is not repeated; the files of several processes make one table with `--runs`."""

from __future__ import annotations

import argparse
import json
import math
import pydoc_data.topics
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import esper
from benchmarks.attach import UserCNN
from benchmarks.play import interval
from esper._files import write_atomic
from esper.runtime.data import load_dataset
from esper.scripts.process import use_one_core

RULES = ("periodic", "plateau", "heuristic")
NOTHING, FINAL = "nothing", "final of "
BACKWARD = 2.0
"""A backward pass counts as this many forward passes."""


class Problem(Protocol):
    """A network, its data and how it is trained."""

    slots: Sequence[str]
    blueprints: tuple[str, ...]
    """Those on offer: the light one of the ladder first, the heavy one last."""
    metric: str
    """Accuracy or loss, in the table. Growth is always told the validation accuracy: learned policies know
    accuracies, and exp(−loss) of text is far below the share of right tokens."""
    classes: int
    batch: int
    lr: float
    steps: int
    """Steps of the ungrown network: the budget, unless another is asked for."""
    val: int
    """Number of validation samples."""

    def model(self) -> nn.Module: ...
    def example(self) -> Any:
        """An input of two samples."""

    def optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer: ...
    def loss(self, model: nn.Module, generator: torch.Generator) -> Tensor:
        """Of one training batch."""

    def score(self, model: nn.Module, split: str) -> float:
        """The metric on a split, of a model in evaluation mode."""

    def accuracy(self, model: nn.Module) -> float:
        """Of validation, likewise."""


def images(name: str, channels: int, val: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Normalised images and labels of each split."""
    data = load_dataset(name)
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (data.mean, data.std))

    def normal(x: Tensor) -> Tensor:
        return ((x.float() / data.scale - mean) / std).expand(-1, channels, -1, -1).contiguous()

    x, y = normal(data.train_x), data.train_y
    return {
        "train": (x[val:], y[val:]),
        "val": (x[:val], y[:val]),
        "test": (normal(data.test_x), data.test_y),
    }


def augmented(x: Tensor, generator: torch.Generator) -> Tensor:
    """A shift of up to four pixels, and every second image mirrored."""
    down, right = torch.randint(-4, 5, (2,), generator=generator).tolist()
    moved = F.pad(x, (4, 4, 4, 4))[:, :, 4 + down : 4 + down + x.shape[2], 4 + right : 4 + right + x.shape[3]]
    flip = torch.rand(len(x), 1, 1, 1, generator=generator) < 0.5
    return torch.where(flip, moved.flip(3), moved)


def hits(logits: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> float:
    """Share of right answers."""
    right = sum(
        int((logits(a).argmax(1) == b).sum()) for a, b in zip(x.split(500), y.split(500), strict=True)
    )
    return right / len(y)


class Cifar:
    """Three stages of 8, 16 and 32 channels behind a stem of stride 2; SGD with momentum."""

    slots: Sequence[str] = ("layer1", "layer2", "layer3")
    blueprints = ("conv_light", "conv_small", "norm", "residual")
    metric, classes, batch, lr, steps, val = "accuracy", 10, 64, 0.1, 2400, 1000

    def __init__(self, dataset: str = "cifar10") -> None:
        self.data = images(dataset, 3, self.val)

    def model(self) -> nn.Module:
        return UserCNN(8, stem_stride=2)

    def example(self) -> Tensor:
        return self.data["train"][0][:2]

    def optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=self.lr, momentum=0.9, weight_decay=5e-4)

    def loss(self, model: nn.Module, generator: torch.Generator) -> Tensor:
        x, y = self.data["train"]
        rows = torch.randint(len(x), (self.batch,), generator=generator)
        return F.cross_entropy(model(augmented(x[rows], generator)), y[rows])

    def score(self, model: nn.Module, split: str) -> float:
        return hits(model, *self.data[split])

    def accuracy(self, model: nn.Module) -> float:
        return self.score(model, "val")


class Stage(nn.Module):
    """A convolution of stride 2, batch norm and ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class StridedCNN(nn.Module):
    def __init__(self, width: int, classes: int = 10) -> None:
        super().__init__()
        self.layer1, self.layer2, self.layer3 = (
            Stage(3, width),
            Stage(width, 2 * width),
            Stage(2 * width, 4 * width),
        )
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer3(self.layer2(self.layer1(x))).mean((2, 3)))


class Strided(Cifar):
    """Three stages of 8, 16 and 32 channels, each one convolution."""

    steps = 14_400

    def model(self) -> nn.Module:
        return StridedCNN(8)


class CausalBlock(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(features), nn.LayerNorm(features)
        self.qkv, self.mix = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.up, self.down = nn.Linear(features, 4 * features), nn.Linear(4 * features, features)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class SmallGPT(nn.Module):
    def __init__(self, alphabet: int, context: int, features: int, heads: int, layers: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(alphabet, features), nn.Embedding(context, features)
        self.blocks = nn.ModuleList(CausalBlock(features, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(features), nn.Linear(features, alphabet)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Text:
    """Two layers of 32 features on the documentation of Python, by character; AdamW. Its slots follow the
    layers, and `transformer_block` makes it one layer deeper."""

    slots: Sequence[str] = ("blocks.0", "blocks.1")
    blueprints = ("mlp_small", "lora", "norm", "transformer_block")
    metric, batch, lr, steps, val = "loss", 32, 3e-3, 1500, 128
    context = 64

    def __init__(self) -> None:
        text = "".join(pydoc_data.topics.topics.values())
        codes = torch.tensor([min(ord(character), 127) for character in text])
        alphabet, tokens = codes.unique(return_inverse=True)
        windows = tokens[: len(tokens) // (self.context + 1) * (self.context + 1)].view(-1, self.context + 1)
        windows = windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))]
        self.classes = len(alphabet)
        self.data = {
            "val": windows[: self.val],
            "test": windows[self.val : 8 * self.val],
            "train": windows[8 * self.val :],
        }

    def model(self) -> nn.Module:
        return SmallGPT(self.classes, self.context, 32, 4, 2)

    def example(self) -> Tensor:
        return self.data["val"][:2, :-1]

    def optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=self.lr, weight_decay=0.01)

    def loss(self, model: nn.Module, generator: torch.Generator) -> Tensor:
        windows = self.data["train"]
        return self._loss(model, windows[torch.randint(len(windows), (self.batch,), generator=generator)])

    def score(self, model: nn.Module, split: str) -> float:
        losses = [float(self._loss(model, some)) for some in self.data[split].split(self.val)]
        return statistics.fmean(losses)

    def accuracy(self, model: nn.Module) -> float:
        """Share of the tokens that are predicted."""
        windows = self.data["val"]
        return float((model(windows[:, :-1]).argmax(-1) == windows[:, 1:]).float().mean())

    def _loss(self, model: nn.Module, windows: Tensor) -> Tensor:
        return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


class Vit:
    """Two layers of 24 features on 8×8 digits, from transformers; AdamW."""

    blueprints = ("mlp_small", "lora", "norm", "mlp")
    metric, classes, batch, lr, steps, val = "accuracy", 10, 64, 3e-3, 400, 300

    def __init__(self) -> None:
        self.data = images("digits", 1, self.val)
        named = self.model().named_modules()
        self.slots = [name for name, module in named if type(module).__name__ == "ViTLayer"]

    def model(self) -> nn.Module:
        from transformers import ViTConfig, ViTForImageClassification

        sizes = {"image_size": 8, "patch_size": 2, "num_channels": 1, "hidden_size": 24}
        depth = {"intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        return ViTForImageClassification(ViTConfig(**sizes, **depth, num_labels=self.classes))

    def example(self) -> dict[str, Tensor]:
        return {"pixel_values": self.data["train"][0][:2]}

    def optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=self.lr, weight_decay=0.01)

    def loss(self, model: nn.Module, generator: torch.Generator) -> Tensor:
        x, y = self.data["train"]
        rows = torch.randint(len(x), (self.batch,), generator=generator)
        return F.cross_entropy(model(pixel_values=x[rows]).logits, y[rows])

    def score(self, model: nn.Module, split: str) -> float:
        return hits(lambda x: model(pixel_values=x).logits, *self.data[split])

    def accuracy(self, model: nn.Module) -> float:
        return self.score(model, "val")


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "cifar": Cifar,
    "strided": Strided,
    "fashion14": partial(Cifar, "fashion14"),
    "text": Text,
    "vit": Vit,
}
"""By name; `fashion14` is the CNN on small images, for a quick look."""


def ladder(problem: Problem) -> dict[str, tuple[tuple[str, str], ...]]:
    """(slot, blueprint) of each seed of each rung."""
    light, heavy = problem.blueprints[0], problem.blueprints[-1]
    rungs: dict[str, tuple[tuple[str, str], ...]] = {NOTHING: ()}
    for weight, blueprint in (("light", light), ("heavy", heavy)):
        for number, slot in enumerate(problem.slots, 1):
            rungs[f"{weight} {number}"] = ((slot, blueprint),)
        rungs[f"{weight} all"] = tuple((slot, blueprint) for slot in problem.slots)
    return rungs


@dataclass(frozen=True, slots=True)
class Result:
    variant: str
    seed: int
    score: float
    """On the test split: accuracy in percent, or loss."""
    parameters: int
    steps: int
    flops: float
    """Charged FLOPs, as a share of the budget."""
    grown: tuple[str, ...]
    """`epoch slot blueprint` of every seed that was planted."""
    pruned: int
    kept: tuple[tuple[str, str], ...]
    """(slot, blueprint) of every seed that was there at the end."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Setting:
    """What all runs share."""

    problem: str
    steps: int
    epochs: int
    """Equal parts of the budget."""


@torch.no_grad()
def forward_flops(model: nn.Module, example: Any) -> float:
    """Of one sample, attention included: torch counts its matrix products, not its fused kernels on CPUs."""
    was_training = model.training
    model.eval()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(**example) if isinstance(example, dict) else model(example)
    model.train(was_training)
    return counter.get_total_flops() / 2


@torch.no_grad()
def judged(judge: Callable[[nn.Module], float], model: nn.Module) -> float:
    """What is measured in evaluation mode."""
    was_training = model.training
    model.eval()
    score = judge(model)
    model.train(was_training)
    return score


def run(
    variant: str,
    seed: int,
    problem: Problem,
    setting: Setting,
    static: Sequence[tuple[str, str]] | None = None,
) -> Result:
    """Train one network for the FLOPs that the ungrown one takes. `static`: the seeds that it has from the
    start, in place of those that its name says."""
    began = time.perf_counter()
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model, example, charged = problem.model(), problem.example(), 0.0
    rung, _, late = variant.partition("@")
    planted_after = int(late or 0)
    by_hand = ladder(problem).get(rung) if static is None else static

    def evaluate() -> float:
        nonlocal charged
        charged += problem.val * forward_flops(model, example)
        return judged(problem.accuracy, model)

    measures = by_hand is None and variant not in ("periodic", "plateau")
    grower = esper.attach(
        model,
        problem.slots,
        example,
        policy=variant if by_hand is None else None,
        epochs=setting.epochs,
        classes=problem.classes,
        evaluate=evaluate if measures else None,
        blueprints=problem.blueprints,
        seed=seed,
        size_price=0.0,
        waste_price=0.0,
        flops_budget=True,
    )
    budget = (1 + BACKWARD) * forward_flops(model, example) * problem.batch * setting.steps

    def plant() -> None:
        if grower.epoch == planted_after:
            for slot, blueprint in by_hand or ():
                grower.germinate(slot, blueprint)

    plant()
    optimizer = problem.optimizer(grower.param_groups())
    spent, taken = 0.0, 0
    while spent < budget and grower.epoch < setting.epochs:
        each = (1 + BACKWARD) * forward_flops(model, example) * problem.batch
        goal = budget * (grower.epoch + 1) / setting.epochs
        while spent < goal:
            share = min(spent / budget, 1.0)
            for group in optimizer.param_groups:
                group["lr"] = problem.lr * min(1.0, 20 * share + 0.05) * 0.5 * (1 + math.cos(math.pi * share))
            problem.loss(model, generator).backward()
            optimizer.step()
            optimizer.zero_grad()
            spent, taken = spent + each, taken + 1
        charged = 0.0
        # One validation per epoch is free for all; those beyond it are charged.
        grower.step(judged(problem.accuracy, model))
        spent += charged
        plant()
    planted = [s for s in grower.history if s.op == "GERMINATE" and s.executed]
    pruned = [s for s in grower.history if s.op == "PRUNE" and s.executed]
    return Result(
        variant,
        seed,
        judged(partial(problem.score, split="test"), model) * (100 if problem.metric == "accuracy" else 1),
        grower.body.total_params(),
        taken,
        spent / budget,
        tuple(f"{s.epoch} {s.slot} {s.blueprint}" for s in planted),
        len(pruned),
        tuple(by_hand or _kept(grower.history)),
        time.perf_counter() - began,
    )


def _kept(history: Sequence[Any]) -> list[tuple[str, str]]:
    there: dict[str, str] = {}
    for step in history:
        if step.executed and step.op == "GERMINATE":
            there[step.slot] = step.blueprint
        elif step.executed and step.op == "PRUNE":
            del there[step.slot]
    return sorted(there.items())


def best_rung(results: Sequence[Result], rungs: Sequence[str], sign: int) -> dict[int, float]:
    """Score of the rung that is best for the other random seeds, by random seed."""
    scores = {(r.variant, r.seed): r.score for r in results if r.variant in rungs}
    known = [rung for rung in rungs if any(variant == rung for variant, _ in scores)]
    seeds = sorted({seed for _, seed in scores if all((rung, seed) in scores for rung in known)})
    if len(seeds) < 2:
        return {}
    best = {}
    for seed in seeds:
        means = {
            rung: statistics.fmean(scores[rung, other] for other in seeds if other != seed) for rung in known
        }
        best[seed] = scores[max(known, key=lambda rung, means=means: sign * means[rung]), seed]  # type: ignore[misc]
    return best


def table(results: Sequence[Result], problem: Problem, policies: Sequence[str] = ()) -> list[str]:
    """Markdown. Differences are paired over random seeds, with the interval of Student's t: a bootstrap of a
    few values is too narrow. Several policies also have a row of their mean in each random seed."""
    rungs, digits = list(ladder(problem)), 2 if problem.metric == "accuracy" else 3
    rivals = {
        "nothing": _scores(results, [NOTHING]),
        "best rung": best_rung(results, rungs, 1 if problem.metric == "accuracy" else -1),
        "largest": _scores(results, rungs[-1:]),
    }
    heads = (f"test {problem.metric}", *(f"− {name}" for name in (*rivals, "its final network")))
    columns = ("variant", *heads, "parameters", "steps", "FLOPs", "planted", "pruned", "random seeds")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    names = dict.fromkeys([*rungs, *(r.variant for r in results)])
    rows = {f"`{name}`": [name] for name in names}
    if len(policies) > 1:
        rows["mean of the policies"] = list(policies)
        rows["mean of their final networks"] = [f"{FINAL}{policy}" for policy in policies]
    for label, variants in rows.items():
        scores = _scores(results, variants)
        mine = [r for r in results if r.variant in variants and r.seed in scores]
        if not mine:
            continue
        cells = [label, f"{statistics.fmean(scores.values()):.{digits}f}"]
        own = _scores(results, [f"{FINAL}{variant}" for variant in variants])
        for theirs in (*rivals.values(), own):
            values = [score - theirs[seed] for seed, score in scores.items() if seed in theirs]
            mean, half = interval(values) if len(values) > 1 else (math.nan, math.nan)
            low, high = mean - half, mean + half
            shown = f"{mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"
            is_itself = variants in ([NOTHING], rungs[-1:]) and not any(values)
            cells.append(shown if len(values) > 1 and not is_itself else "")
        cells += [f"{statistics.fmean(r.parameters for r in mine):,.0f}"]
        cells += [f"{statistics.fmean(r.steps for r in mine):,.0f}"]
        cells += [f"{statistics.fmean(r.flops for r in mine):.3f}"]
        cells += [f"{statistics.fmean(len(r.grown) for r in mine):.1f}"]
        cells += [f"{statistics.fmean(r.pruned for r in mine):.1f}", str(len(scores))]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _scores(results: Sequence[Result], variants: Sequence[str]) -> dict[int, float]:
    """Mean score of the variants by random seed, for those that all of them have."""
    scores = {(r.variant, r.seed): r.score for r in results}
    seeds = sorted({seed for _, seed in scores})
    return {
        seed: statistics.fmean(scores[variant, seed] for variant in variants)
        for seed in seeds
        if all((variant, seed) in scores for variant in variants)
    }


def read_runs(path: Path, setting: Setting) -> list[Result]:
    """The finished runs in a file, which must have this setting."""
    kept = json.loads(path.read_text())
    if kept["setting"] != asdict(setting):
        raise SystemExit(f"{path} has runs with {kept['setting']}, not {asdict(setting)}")
    return [_as_result(result) for result in kept["results"]]


def _as_result(values: Mapping[str, Any]) -> Result:
    kept = tuple((slot, blueprint) for slot, blueprint in values["kept"])
    return Result(**{**values, "grown": tuple(values["grown"]), "kept": kept})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attach_worth",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("problem", choices=PROBLEMS)
    parser.add_argument("--policy", nargs="+", default=[], help="learned policies, as in esper.attach")
    parser.add_argument("--variants", nargs="+", help="some of the rungs and rules; default: all")
    parser.add_argument(
        "--seeds", type=int, default=8, help="number of random seeds, the same for all variants"
    )
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="steps of the ungrown network: the budget")
    parser.add_argument("--epochs", type=int, default=24, help="equal parts of the budget")
    parser.add_argument("--out", type=Path, help="JSON of all runs; those that it has are kept")
    parser.add_argument(
        "--runs", type=Path, nargs="+", default=[], help="files of other processes, for the table"
    )
    given = parser.parse_args(arguments)
    use_one_core()
    problem = PROBLEMS[given.problem]()
    setting = Setting(given.problem, given.steps or problem.steps, given.epochs)
    known = [*ladder(problem), *RULES]
    variants = known if given.variants is None else given.variants
    for variant in variants:
        rung, at, epoch = variant.partition("@")
        late = rung in ladder(problem) and epoch.isdecimal() and 0 < int(epoch) < setting.epochs
        if (at and not late) or (not at and variant not in known):
            raise SystemExit(
                f"unknown variant {variant!r}; allowed: {', '.join(known)}, or a rung, @ and an epoch"
            )
    results = [] if given.out is None or not given.out.exists() else read_runs(given.out, setting)
    others = [result for path in given.runs for result in read_runs(path, setting)]
    done = {(result.variant, result.seed): result for result in (*others, *results)}
    finals = {f"{FINAL}{policy}": policy for policy in given.policy}
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        for variant in (*variants, *given.policy, *finals):
            if (variant, seed) in done:
                continue
            static = done[finals[variant], seed].kept if variant in finals else None
            results.append(run(variant, seed, problem, setting, static))
            done[variant, seed] = results[-1]
            print(results[-1], flush=True)
            if given.out is not None:
                given.out.parent.mkdir(parents=True, exist_ok=True)
                runs = {"setting": asdict(setting), "results": [asdict(result) for result in results]}
                write_atomic(given.out, json.dumps(runs).encode())
    print("\n".join(table([*done.values()], problem, given.policy)))


if __name__ == "__main__":
    main()
