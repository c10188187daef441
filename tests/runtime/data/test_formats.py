"""File formats against files that the test itself encodes."""

from __future__ import annotations

import gzip
import io
import os
import struct
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from esper.runtime.data.formats import (
    CIFAR_BATCHES,
    DataError,
    decode_idx,
    decode_png,
    encode_characters,
    pool_images,
    read_cifar_records,
    read_members,
    text_chunks,
)


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def paeth(a: int, b: int, c: int) -> int:
    p = a + b - c
    return min((a, b, c), key=lambda v: abs(p - v))  # min keeps the first of equals: a, then b, then c


def encode_png(image: np.ndarray, filters: list[int], *, depth: int = 8, interlace: int = 0) -> bytes:
    """The PNG specification, byte by byte."""
    height, width, channels = image.shape
    rows = image.reshape(height, -1).astype(int).tolist()
    data = bytearray()
    for y, kind in enumerate(filters):
        data.append(kind)
        for i, value in enumerate(rows[y]):
            left = rows[y][i - channels] if i >= channels else 0
            above = rows[y - 1][i] if y else 0
            corner = rows[y - 1][i - channels] if y and i >= channels else 0
            guess = (0, left, above, (left + above) // 2, paeth(left, above, corner))[kind]
            data.append((value - guess) % 256)
    packed = zlib.compress(bytes(data))
    header = struct.pack(">IIBBBBB", width, height, depth, {1: 0, 3: 2, 4: 6}[channels], 0, 0, interlace)
    half = len(packed) // 2  # image data may come in several chunks, with others between the header and them
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"tEXt", b"a\0b")
        + chunk(b"IDAT", packed[:half])
        + chunk(b"IDAT", packed[half:])
        + chunk(b"IEND", b"")
    )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_png_roundtrip_with_every_filter(data: st.DataObject) -> None:
    height, width = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 7))
    channels = data.draw(st.sampled_from([1, 3, 4]))
    filters = data.draw(st.lists(st.integers(0, 4), min_size=height, max_size=height))
    levels = data.draw(
        st.sampled_from([3, 256])
    )  # few levels make the ties that the Paeth filter must break in order
    image = np.random.default_rng(data.draw(st.integers(0, 99))).integers(
        0, levels, (height, width, channels), dtype=np.uint8
    )
    assert np.array_equal(decode_png(encode_png(image, filters)), image)


@pytest.mark.parametrize("kind", range(5))
def test_png_each_filter_alone(kind: int) -> None:
    for levels in (3, 256):
        image = np.random.default_rng(kind).integers(0, levels, (9, 11, 3), dtype=np.uint8)
        assert np.array_equal(decode_png(encode_png(image, [kind] * 9)), image)


def test_png_errors() -> None:
    good = encode_png(np.zeros((2, 2, 3), np.uint8), [0, 0])
    with pytest.raises(DataError, match="not a PNG file: it starts with b'GIF89a"):
        decode_png(b"GIF89a..")
    with pytest.raises(DataError, match="truncated or damaged"):
        decode_png(good[: good.index(b"IDAT") + 8] + b"\xff" + good[good.index(b"IDAT") + 9 :])
    with pytest.raises(DataError, match="truncated or damaged"):
        decode_png(good[: good.index(b"IDAT") + 9])
    with pytest.raises(DataError, match="truncated or damaged"):
        decode_png(
            good.replace(good[good.index(b"IDAT") - 4 : -12], chunk(b"IDAT", zlib.compress(b"\0" * 5)))
        )
    grey = io.BytesIO()
    Image.fromarray(np.zeros((2, 2), np.uint16)).save(grey, "PNG")
    with pytest.raises(DataError, match="PNG has mode I;16; allowed: L, RGB, RGBA"):
        decode_png(grey.getvalue())
    jpeg = io.BytesIO()
    Image.fromarray(np.zeros((2, 2, 3), np.uint8)).save(jpeg, "JPEG")
    with pytest.raises(DataError, match="not a PNG file"):
        decode_png(jpeg.getvalue())


@pytest.mark.parametrize("side", [10_000, 100_000], ids=["above the limit", "above twice the limit"])
def test_a_decompression_bomb_is_refused_before_it_is_decoded(side: int) -> None:
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100))
    with pytest.raises(DataError, match=f"PNG is too large: Image size \\({side * side} pixels\\)"):
        decode_png(bomb + chunk(b"IEND", b""))


def idx_bytes(array: np.ndarray) -> bytes:
    return b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def test_idx_plain_and_gzipped(tmp_path: Path) -> None:
    array = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    (tmp_path / "plain").write_bytes(idx_bytes(array))
    (tmp_path / "packed.gz").write_bytes(gzip.compress(idx_bytes(array)))
    for name in ("plain", "packed.gz"):
        assert np.array_equal(decode_idx((tmp_path / name).read_bytes(), name), array)


def test_idx_errors(tmp_path: Path) -> None:
    good = idx_bytes(np.arange(24, dtype=np.uint8).reshape(2, 3, 4))
    for content, message in [
        (good[:-1], r"says shape \(2, 3, 4\) and holds 23 bytes"),
        (b"\0\0\x0d\x01....", "not an IDX file"),
        (b"", "not an IDX file"),
        (gzip.compress(good)[:-9], "truncated or damaged"),
    ]:
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(DataError, match=message):
            decode_idx((tmp_path / "file").read_bytes(), tmp_path / "file")


def test_pooling_averages_and_rounds_halves_up() -> None:
    images = np.array([[[0, 1, 255, 255], [1, 0, 255, 254]]], np.uint8)[..., None]
    assert pool_images(images).shape == (1, 1, 2, 1)
    assert pool_images(images).ravel().tolist() == [1, 255]  # of 0.5 and 254.75
    random = np.random.default_rng(0).integers(0, 256, (3, 6, 4, 2), dtype=np.uint8)
    means = random.astype(float).reshape(3, 3, 2, 2, 2, 2).mean((2, 4))
    assert np.array_equal(pool_images(random), np.floor(means + 0.5))


def test_cifar_records_from_archive(tmp_path: Path) -> None:
    record = np.zeros((10_000, 3073), np.uint8)
    record[:, 0] = np.arange(10_000) % 10
    record[7, 1:] = np.arange(3072) % 251  # planes of red, green, blue, each by rows
    directory = tmp_path / "cifar-10-batches-bin"
    directory.mkdir()
    record.tofile(directory / "test_batch.bin")
    for batch in CIFAR_BATCHES[:-1]:
        os.link(directory / "test_batch.bin", directory / f"{batch}.bin")
    with tarfile.open(tmp_path / "cifar.tar", "w", dereference=True) as tar:
        tar.add(directory, arcname=directory.name)
    for path in (directory, tmp_path / "cifar.tar"):
        arrays = read_cifar_records(path)
        assert arrays["train_x"].shape == (50_000, 32, 32, 3)
        assert arrays["test_x"].shape == (10_000, 32, 32, 3)
        assert arrays["train_y"][:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
        assert arrays["test_x"][7, 3, 5].tolist() == [(plane * 1024 + 3 * 32 + 5) % 251 for plane in range(3)]
    (directory / "test_batch.bin").unlink()
    record[0, 0] = 1
    record.tofile(directory / "test_batch.bin")
    with pytest.raises(DataError, match=r"test labels per class are \[999, 1001,"):
        read_cifar_records(directory)
    record[1:].tofile(directory / "test_batch.bin")
    with pytest.raises(DataError, match=r"test_batch.bin holds 30726927 bytes, expected 30730000"):
        read_cifar_records(directory)
    (directory / "test_batch.bin").unlink()
    with pytest.raises(DataError, match=r"lacks test_batch.bin"):
        read_cifar_records(directory)


def test_archive_errors(tmp_path: Path) -> None:
    (tmp_path / "a.tgz").write_bytes(b"no archive")
    with pytest.raises(DataError, match="cannot be read as a tar archive"):
        read_members(tmp_path / "a.tgz", ["x"])
    with tarfile.open(tmp_path / "b.tgz", "w:gz"):
        pass
    with pytest.raises(DataError, match=r"b.tgz lacks x, y"):
        read_members(tmp_path / "b.tgz", ["x", "y"])


def test_characters_in_chunks(tmp_path: Path) -> None:
    text = "ab—ça va?\r\n" * 50
    (tmp_path / "t.txt").write_bytes(text.encode())
    tokens, vocab = encode_characters(lambda: text_chunks(tmp_path / "t.txt", size=7))
    assert "".join(vocab[t] for t in tokens) == text
    assert vocab == sorted(set(text))
    assert tokens.dtype == np.uint8
    many = "".join(chr(200 + i) for i in range(300))
    tokens, vocab = encode_characters(lambda: [many])
    assert tokens.dtype == np.int32
    assert "".join(vocab[t] for t in tokens) == many
    (tmp_path / "t.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="not UTF-8"):
        list(text_chunks(tmp_path / "t.txt"))
