"""`make bench` on a machine without CIFAR-10: no traceback, and the report says what is missing and why."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from benchmarks.harness import Datasets, Row

from benchmarks import run, system

CIFAR_ROWS = {"system.vs_bare.cifar_impaired", "system.vs_bare.cifar_baseline"}


@pytest.fixture
def data_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty data directory; no network (every address is a closed port) and no package clients."""
    root = tmp_path / "data"
    monkeypatch.setenv("ESPER_DATA", str(root))
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    return root


@pytest.mark.parametrize(
    ("flags", "reason"),
    [(["--offline"], "dataset cifar10 is not in .*; to get it"), ([], "cannot get cifar10: cannot download")],
)
def test_a_missing_dataset_leaves_its_row_out_and_says_so(data_root, tmp_path, capsys, flags, reason) -> None:
    out = tmp_path / "bench.json"
    run.main(["--only", "data", "--out", str(out), *flags])
    report = json.loads(out.read_text())
    assert report["data.pipeline_share.cifar_baseline"] is None
    assert re.match(f"data.pipeline_share.cifar_baseline: {reason}", report["skipped"])
    assert report["data.pipeline_share.digits_impaired"] > 0
    assert all(isinstance(value, float | str | None) for value in report.values()), "flat"
    printed = capsys.readouterr().out
    assert "skipped data.pipeline_share.cifar_baseline: " in printed
    assert ("fetching it as `esper data get cifar10`" in printed) == (not flags)


def test_whole_rounds_on_cifar_are_left_out_too(data_root, monkeypatch) -> None:
    monkeypatch.setattr(system, "GOALS", {name: g for name, g in system.GOALS.items() if "cifar" in name})
    monkeypatch.setattr(system, "growth_in_envs", lambda: ())
    rows = list(system.rows(Datasets(fetch=False, say=print)))
    assert {row.name for row in rows} == CIFAR_ROWS
    assert all(row.value is None and "cifar10 is not in" in row.skipped for row in rows)


def test_a_missing_dataset_is_asked_for_once(data_root) -> None:
    said: list[str] = []
    datasets = Datasets(fetch=True, say=said.append)
    assert datasets.why_missing("cifar10") == datasets.why_missing("cifar10")
    assert sum("fetching it" in line for line in said) == 1


def test_published_files_in_the_data_directory_are_enough(data_root) -> None:
    folder = data_root / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    records = np.zeros((10_000, 3073), np.uint8)
    records[:, 0] = np.arange(10_000) % 10
    for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
        records.tofile(folder / name)
    assert Datasets(fetch=False, say=print).why_missing("cifar10") is None


def test_goals_are_judged_by_what_was_measured() -> None:
    assert run.verdict(Row("a", 1.0, 2.0), noisy=False) == "held"
    assert run.verdict(Row("a", 3.0, 2.0), noisy=False) == "missed"
    assert run.verdict(Row("a", 3.0, 2.0), noisy=True) == "noisy"
    assert run.verdict(Row("a", None, 2.0, skipped="no data"), noisy=False) == "skipped"


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in Path(run.__file__).parent.glob("*.py") if path.stem != "__init__")
)
def test_every_benchmark_can_be_imported(name) -> None:
    assert import_module(f"benchmarks.{name}").__doc__
