"""Pictures of the page in docs/images, of a run that is training: `python tests/screenshots.py RUNS`.
RUNS is a directory for what they show; what it already holds is shown again, but for the run that trains.
`--all DIR` also writes every view in both widths and both lights to a directory, to be looked at."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from PIL import Image

from browser import Browser
from esper.scripts.cli import main as esper
from esper.simic import train_ppo_vectorized
from grower_helpers import SmallCNN, accuracy, attach, make, train_epoch
from web.conftest import Site, serving

IMAGES = Path(__file__).parents[1] / "docs" / "images"
TRAINING = {
    "task": "digits_impaired", "envs": 4, "population": 8, "seed": 3, "episode_length": 16,
    "steps_per_epoch": 6, "val_size": 64, "permissive_gates": True,
}  # fmt: skip
ROUNDS_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Shot:
    """A view, and what is true once it is drawn."""

    address: str
    ready: str
    height: int = 900


VIEWS = {
    "runs": Shot("runs", "document.querySelectorAll('tbody tr').length >= 3", 420),
    "run": Shot("run/live", "document.querySelectorAll('#learning svg').length >= 4", 1000),
    "growth": Shot("run/live/growth", "document.querySelectorAll('#lanes svg').length >= 4", 1000),
    "network": Shot("network/live/newest/1/11", "document.querySelector('#drawing .seed .body')", 900),
    "why": Shot("why/live/newest/1", "document.querySelectorAll('.panel').length === 7", 1150),
    "compare": Shot("compare/live/random", "document.querySelectorAll('.grid svg').length === 2", 1000),
    "proof": Shot("proof", "document.querySelector('section svg')", 1000),
    "own": Shot("own", "document.querySelector('tr[data-run=mine]')", 420),
    "mine": Shot("network/mine", "document.querySelector('#drawing .body')", 800),
}
IN_DOCS = {
    "page-runs": ("runs", 1280, False),
    "page-run": ("run", 1280, False),
    "page-network": ("network", 1280, True),
    "page-why": ("why", 1280, False),
    "page-narrow": ("network", 390, False),
}
"""Name of each picture: its view, its width, and whether it is dark."""


def prepare(root: Path) -> None:
    """A finished run, a proof, and a network of one's own, where they are missing."""
    if not (root / "random").exists():
        directory = str(root / "random")
        train_ppo_vectorized(**TRAINING, policy="random", rounds=ROUNDS_SHOWN, telemetry_dir=directory)
    if not (root / "proof").exists():
        task = "digits_shift:episode_length=12,steps_per_epoch=8,val_size=128"
        prove = ["prove", "--task", task, "--policy", "digits_shift-1", "--networks", "4"]
        assert esper([*prove, "--probe-networks", "8", "--out", str(root / "proof")]) == 0
    if not (root / "mine").exists():
        model = make(lambda: SmallCNN(4))
        planted = [(2, "layer2", "conv_light"), (5, "layer1", "norm")]
        grower = attach(
            model, policy=planted, epochs=16, record=root / "mine", evaluate=lambda: accuracy(model)
        )
        optimizer = torch.optim.AdamW(grower.param_groups(lr=0.02))
        while grower.epoch < 16:
            train_epoch(model, optimizer)
            grower.step()


@contextmanager
def live_site(root: Path) -> Iterator[Site]:
    """A site with a run that trains as long as it is looked at."""
    shutil.rmtree(root / "live", ignore_errors=True)
    live = TRAINING | {"rounds": 1000, "telemetry_dir": str(root / "live")}
    code = (
        "import torch; torch.set_num_threads(1); from esper.simic import train_ppo_vectorized as train; "
        f"train(**{live!r})"
    )
    training = subprocess.Popen([sys.executable, "-c", code])
    try:
        with serving(root) as site:
            yield site
    finally:
        training.terminate()
        training.wait()


def take(browser: Browser, site: Site, name: str, width: int, path: Path, *, dark: bool) -> None:
    shot = VIEWS[name]
    browser.look(width, shot.height if width > 600 else 1500, dark=dark)
    browser.open("about:blank")
    browser.open(f"{site.url}#/{shot.address}")
    browser.wait(shot.ready, 120)
    time.sleep(0.5)  # charts that came into view with the last change
    browser.screenshot(path)
    with Image.open(path) as image:
        plain = image.convert("RGB")
    plain.save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, metavar="RUNS", help="directory for what the pictures show")
    parser.add_argument("--all", type=Path, metavar="DIR", help="every view in both widths and both lights")
    given = parser.parse_args()
    torch.set_num_threads(1)
    prepare(given.runs)
    with live_site(given.runs) as site, Browser() as browser:
        browser.open(f"{site.url}#/runs")
        browser.wait("document.querySelector('tr[data-run=live]')", 600)
        browser.open(f"{site.url}#/run/live")
        browser.wait(f"document.querySelector('#round')?.options.length >= {ROUNDS_SHOWN}", 1200)
        for picture, (name, width, dark) in IN_DOCS.items():
            take(browser, site, name, width, IMAGES / f"{picture}.png", dark=dark)
        if given.all is not None:
            given.all.mkdir(parents=True, exist_ok=True)
            for name, width, dark in product(VIEWS, (1280, 390), (False, True)):
                path = given.all / f"{name}-{width}-{'dark' if dark else 'light'}.png"
                take(browser, site, name, width, path, dark=dark)
        browser.open("about:blank")
    if browser.problems:
        raise SystemExit("\n".join(browser.problems))


if __name__ == "__main__":
    main()
