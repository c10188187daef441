"""Datasets by name, and splits that never overlap."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from esper.leyline.errors import EsperError
from esper.leyline.rng import stream_seed
from esper.runtime.data import (
    DataError,
    Dataset,
    SharedBatchIterator,
    dataset_names,
    load_dataset,
    register_dataset,
    synthetic_dataset,
    validation_batches,
    validation_split,
)
from esper.runtime.data import test_batches as held_out
from esper.runtime.data.datasets import dataset_facts, stratified
from esper.runtime.data.sources import cache_file, data_root


def text_dataset(length: int = 1000) -> Dataset:
    tokens = torch.arange(length) % 251
    tokens = tokens.to(torch.uint8)
    return Dataset(
        name="text",
        kind="text",
        train_x=tokens,
        train_y=tokens[1:],
        test_x=tokens[:200],
        test_y=tokens[1:200],
        num_classes=251,
    )


def test_digits() -> None:
    data = load_dataset("digits")
    assert data.train_x.shape == (1347, 1, 8, 8)
    assert data.test_x.shape == (450, 1, 8, 8)
    assert data.train_x.dtype == torch.uint8
    assert data.train_y.dtype == torch.int64
    assert int(data.train_x.max()) == 16
    assert data.test_y.bincount().tolist() == [45, 45, 44, 46, 46, 45, 46, 44, 44, 45]
    assert (data.pad, data.flip) == (0, False)
    pixels = data.train_x.double() / 16
    assert float(pixels.mean()) == pytest.approx(data.mean[0], abs=5e-5)
    assert float(pixels.std(correction=0)) == pytest.approx(data.std[0], abs=5e-5)


def test_digits_parts_do_not_overlap_and_keep_their_images() -> None:
    data = load_dataset("digits")
    seen = {bytes(image.numpy().tobytes()) for image in data.train_x}
    assert not any(
        bytes(image.numpy().tobytes()) in seen for image in data.test_x
    )  # no image occurs twice in the set
    zero, one = (data.train_x[data.train_y == label, 0].double().mean(0) for label in (0, 1))
    assert zero[3:5, 3:5].mean() < 2 < one[3:5, 3:5].mean()  # a zero has a hole in the middle


def test_mnist1d() -> None:
    data = load_dataset("mnist1d")
    assert data.train_x.shape == (4000, 1, 1, 40)
    assert data.test_x.shape == (1000, 1, 1, 40)
    assert data.train_y.bincount(minlength=10).tolist() == [398, 396, 411, 394, 394, 402, 401, 404, 402, 398]
    split = validation_split(data, 500, 0)
    signals = torch.cat([batch.x for batch in validation_batches(split, 100).batches(rows=1)])
    assert signals.shape == (500, 1, 1, 40)
    # The published set is standardised as a whole; quantisation to 23 levels per unit moves it very little.
    assert float(signals.mean()) == pytest.approx(0, abs=0.03)
    assert float(signals.std()) == pytest.approx(1, abs=0.03)
    levels = signals * 23
    assert torch.allclose(levels, levels.round(), atol=1e-3)
    published = torch.tensor([-0.3320, -0.4719, -0.7787, -1.0097, -0.8824, 0.1039])  # of the first signal
    first = (data.train_x[0, 0, 0, :6] / data.scale - data.mean[0]) / data.std[0]
    assert data.train_y[0] == 2
    assert float((first - published).abs().max()) < 0.5 / 23 + 1e-4


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        DataError, match=r"dataset 'svhn' is unknown; allowed: cifar10, digits, .*tinystories"
    ):
        load_dataset("svhn")
    assert issubclass(DataError, EsperError)
    assert dataset_names() == [
        "digits",
        "digits_flat",
        "mnist1d",
        "cifar10",
        "fashion_mnist",
        "mnist",
        "sotu",
        "shakespeare",
        "tinystories",
        "mnist14",
        "fashion14",
        "synthetic",
    ]


def test_synthetic_is_deterministic_and_has_any_shape() -> None:
    a, b = load_dataset("synthetic:2x6x5"), load_dataset("synthetic:2x6x5")
    assert a.train_x.shape == (5000, 2, 6, 5)
    assert torch.equal(a.train_x, b.train_x)
    assert torch.equal(a.test_y, b.test_y)
    assert load_dataset("synthetic").train_x.shape == (5000, 3, 32, 32)
    assert not torch.equal(
        synthetic_dataset((1, 4, 4), seed=1).train_x, synthetic_dataset((1, 4, 4), seed=2).train_x
    )
    prototypes = torch.stack([a.train_x[a.train_y == c].double().mean(0) for c in range(10)])
    nearest = torch.cdist(a.test_x.double().flatten(1), prototypes.flatten(1)).argmin(1)
    assert (nearest == a.test_y).double().mean() > 0.9  # the classes can be told apart
    with pytest.raises(DataError, match="allowed: all ≥ 1"):
        load_dataset("synthetic:0x6x5")


@pytest.mark.parametrize("name", ["digits", "synthetic:3x4x4"])
def test_images_are_channels_last(name: str) -> None:
    data = load_dataset(name)
    assert data.train_x.is_contiguous(memory_format=torch.channels_last)
    assert data.test_x.is_contiguous(memory_format=torch.channels_last)


def test_stratified_keeps_proportions() -> None:
    labels = np.repeat([0, 1, 2], [500, 300, 200])
    chosen = stratified(labels, 100, seed=3)
    assert np.bincount(labels[chosen]).tolist() == [50, 30, 20]
    assert len(set(chosen.tolist())) == 100
    assert not np.array_equal(chosen, stratified(labels, 100, seed=4))
    assert stratified(labels, 0, seed=3).size == 0


def test_validation_split_is_fixed_and_disjoint() -> None:
    data = load_dataset("digits")
    split = validation_split(data, 300, 7)
    assert len(split.val) == 300
    assert sorted([*split.val, *split.train]) == list(range(1347))
    assert np.array_equal(split.val, validation_split(data, 300, 7).val)
    assert not np.array_equal(split.val, validation_split(data, 300, 8).val)
    assert np.array_equal(split.val, stratified(data.train_y.numpy(), 300, stream_seed(7, "split")))
    assert abs(np.bincount(data.train_y[split.val]) - 30).max() <= 1
    assert len(validation_split(data, 0, 7).train) == 1347


def test_the_last_epoch_may_have_more_validation_samples() -> None:
    data = load_dataset("digits")
    split = validation_split(data, 256, 7, final_size=512)
    assert (len(split.val), len(split.final)) == (256, 512)
    assert set(split.val) < set(split.final)
    assert sorted([*split.final, *split.train]) == list(range(1347))
    shares = np.bincount(data.train_y) / 1347
    assert abs(np.bincount(data.train_y[split.final]) - 512 * shares).max() <= 2
    assert np.array_equal(split.val, validation_split(data, 256, 7).val), "the others keep theirs"
    assert np.array_equal(split.final, validation_split(data, 256, 7, final_size=512).final)
    other = validation_split(data, 256, 8, final_size=512)
    assert set(other.final) - set(other.val) != set(split.final) - set(split.val)
    for size in (0, 100):
        same = validation_split(data, 256, 7, final_size=size)
        assert np.array_equal(same.final, same.val)


def test_more_text_for_the_last_epoch_comes_from_the_end_too() -> None:
    split = validation_split(text_dataset(), 10, 0, block=16, final_size=25)
    assert np.array_equal(split.final[-10:], split.val)
    assert np.array_equal(split.final, np.arange(62 - 25, 62))
    assert split.train[-1] * 16 + 15 + 16 < split.final[0] * 16, "no token is read in both"
    assert validation_split(text_dataset(), 0, 0, block=16).val.size == 0
    assert validation_split(text_dataset(), 0, 0, block=16).final.size == 0


def test_text_split_shares_no_token() -> None:
    split = validation_split(text_dataset(), 10, 0, block=16)
    first_val = split.val[0] * 16
    last_read = split.train[-1] * 16 + 15 + 16  # last window, largest shift, its last target
    assert last_read < first_val
    assert split.val[-1] * 16 + 16 < 1000
    assert len(split.val) == 10
    assert np.array_equal(split.train, np.arange(len(split.train)))


def test_split_errors() -> None:
    data = load_dataset("digits")
    with pytest.raises(
        DataError,
        match="val_size 1347, final_size 1347 of 1347 samples for training in digits; allowed: 0 to 1346",
    ):
        validation_split(data, 1347, 0)
    with pytest.raises(DataError, match="val_size 10, final_size 1347 of 1347"):
        validation_split(data, 10, 0, final_size=1347)
    with pytest.raises(DataError, match="val_size -1"):
        validation_split(data, -1, 0)
    with pytest.raises(DataError, match="block 16 with image data"):
        validation_split(data, 10, 0, block=16)
    with pytest.raises(DataError, match="block 0 with text data"):
        validation_split(text_dataset(), 10, 0)
    with pytest.raises(DataError, match="val_size 62, final_size 62 of 62"):
        validation_split(text_dataset(), 62, 0, block=16)


def test_to_device_moves_every_tensor() -> None:
    moved = load_dataset("digits").to("meta")
    assert {getattr(moved, key).device.type for key in ("train_x", "train_y", "test_x", "test_y")} == {"meta"}


def test_data_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ESPER_DATA", str(tmp_path / "env"))
    assert data_root() == tmp_path / "env"
    assert data_root(tmp_path) == tmp_path
    monkeypatch.delenv("ESPER_DATA")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_root() == tmp_path / ".cache" / "esper"


def ready(name: str) -> pytest.MarkDecorator:
    here = cache_file(name, data_root()).exists()
    return pytest.mark.skipif(not here, reason=f"{name} is not in the data directory (esper data get {name})")


@ready("cifar10")
def test_cifar10_is_the_published_set() -> None:
    data = load_dataset("cifar10")
    assert data.train_x.shape == (50_000, 3, 32, 32)
    assert data.train_x.is_contiguous(memory_format=torch.channels_last)
    values = np.arange(256) / 255
    published = [(0.49139968, 0.24703223), (0.48215841, 0.24348513), (0.44653091, 0.26158784)]
    for channel, (mean, std) in enumerate(published):
        share = np.bincount(data.train_x[:, channel].reshape(-1).numpy(), minlength=256) / (50_000 * 1024)
        assert share @ values == pytest.approx(mean, abs=1e-8)
        assert np.sqrt(share @ values**2 - (share @ values) ** 2) == pytest.approx(std, abs=1e-8)
    assert data.train_y.bincount().tolist() == [5000] * 10
    assert data.test_y.bincount().tolist() == [1000] * 10
    assert data.train_y[:5].tolist() == [6, 9, 9, 4, 1]
    assert data.test_y[:5].tolist() == [3, 8, 8, 0, 6]
    # Neighbouring pixels are alike in rows and in columns: neither planes nor axes are mixed up.
    sample = data.test_x[:500].double()
    assert (sample[..., 1:] - sample[..., :-1]).abs().mean() < 16
    assert (sample[..., 1:, :] - sample[..., :-1, :]).abs().mean() < 16


@ready("fashion_mnist")
def test_fashion_mnist() -> None:
    data = load_dataset("fashion_mnist")
    assert data.train_x.shape == (60_000, 1, 28, 28)
    assert data.train_y.bincount().tolist() == [6000] * 10
    assert data.test_y.bincount().tolist() == [1000] * 10


@ready("mnist")
def test_mnist_is_the_published_set() -> None:
    data = load_dataset("mnist")
    assert data.train_x.shape == (60_000, 1, 28, 28)
    assert data.train_y.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert data.test_y.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert data.train_y[:5].tolist() == [5, 0, 4, 1, 9]


@pytest.mark.parametrize(
    ("name", "base"),
    [
        pytest.param("mnist14", "mnist", marks=[ready("mnist14"), ready("mnist")]),
        pytest.param("fashion14", "fashion_mnist", marks=[ready("fashion14"), ready("fashion_mnist")]),
    ],
)
def test_small_variants_are_the_pooled_images(name: str, base: str) -> None:
    data, whole = load_dataset(name), load_dataset(base)
    assert data.train_x.shape == (60_000, 1, 14, 14)
    assert torch.equal(data.train_y, whole.train_y)
    means = torch.nn.functional.avg_pool2d(whole.test_x.float(), 2)
    assert torch.equal(data.test_x, (means + 0.5).floor().to(torch.uint8))
    pixels = data.train_x.double() / 255
    assert float(pixels.mean()) == pytest.approx(data.mean[0], abs=5e-5)
    assert float(pixels.std(correction=0)) == pytest.approx(data.std[0], abs=5e-5)


@ready("shakespeare")
def test_shakespeare() -> None:
    data = load_dataset("shakespeare")
    assert data.num_classes == len(data.vocab) == 84
    assert len(data.train_x) + len(data.test_x) == 5_057_280
    assert "".join(data.vocab[t] for t in data.train_x[:25]) == "ALL'S WELL THAT ENDS WELL"


@ready("sotu")
def test_sotu() -> None:
    data = load_dataset("sotu")
    assert data.num_classes == len(data.vocab) == 106
    assert data.train_x.dtype == torch.uint8
    assert len(data.train_x) + len(data.test_x) == 12_181_589
    assert "".join(data.vocab[t] for t in data.train_x[:16]) == "Fellow-Citizens "
    assert torch.equal(data.train_y, data.train_x[1:])


# -- registered datasets -------------------------------------------------------------------------------------


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registrations of a test end with it."""
    monkeypatch.setattr("esper.runtime.data.datasets._REGISTERED", {})


def arrays(shape: tuple[int, ...], *, classes: int = 3, train: int = 40, test: int = 10) -> dict:
    rng = np.random.default_rng(0)
    return {
        "train_x": rng.integers(0, 256, (train, *shape), dtype=np.uint8),
        "train_y": np.arange(train) % classes,
        "test_x": rng.integers(0, 256, (test, *shape), dtype=np.uint8),
        "test_y": np.arange(test) % classes,
    }


@pytest.mark.usefixtures("registered")
def test_registered_images_become_normalised_batches() -> None:
    data = arrays((8, 8, 3))
    register_dataset("mine", data)
    dataset = load_dataset("mine")
    assert (dataset.kind, dataset.num_classes) == ("image", 3)
    assert dataset.mean == pytest.approx(tuple(data["train_x"].mean((0, 1, 2)) / 255))
    assert dataset.std == pytest.approx(tuple(data["train_x"].std((0, 1, 2)) / 255))
    assert np.array_equal(dataset.train_x.permute(0, 2, 3, 1).numpy(), data["train_x"])
    data["train_x"][:] = 0
    assert dataset.train_x.any(), "the dataset is a copy"
    split = validation_split(dataset, 10, 0)
    (batch,) = next(iter(SharedBatchIterator(split, [[0, 1]], 5, steps_per_epoch=2, seed=0, rows=[8])))
    assert (batch.x.shape, batch.y.shape) == ((5, 24, 8, 8), (8, 5))
    register_dataset("grey", arrays((8, 8)), mean=(0.5,), std=(0.25,), pad=1, flip=True)
    grey = load_dataset("grey")
    assert (grey.train_x.shape, grey.mean, grey.pad, grey.flip) == ((40, 1, 8, 8), (0.5,), 1, True)


@pytest.mark.usefixtures("registered")
def test_registered_vectors_reach_each_row_as_they_are() -> None:
    data = arrays((5,))
    register_dataset("mine", data, classes=7)
    dataset = load_dataset("mine")
    assert (dataset.kind, dataset.num_classes, dataset.train_x.dtype) == ("vector", 7, torch.float32)
    split = validation_split(dataset, 10, 0)
    (batch,) = next(iter(SharedBatchIterator(split, [[0, 1]], 6, steps_per_epoch=2, seed=0, rows=[8])))
    assert (batch.x.shape, batch.y.shape) == ((8, 6, 5), (8, 6))
    rows = {tuple(x): y for x, y in zip(data["train_x"].tolist(), data["train_y"].tolist(), strict=True)}
    for x, y in zip(batch.x.flatten(0, 1).tolist(), batch.y.flatten().tolist(), strict=True):
        assert rows[tuple(x)] == y
    (held,) = validation_batches(split, 10).batches(rows=3)
    assert (held.x.shape, held.y.shape) == ((3, 10, 5), (3, 10))
    assert [len(b.x[0]) for b in held_out(split, 4).batches()] == [4, 4, 2]


@pytest.mark.usefixtures("registered")
def test_registered_tokens_are_text() -> None:
    register_dataset("mine", {"train_x": np.arange(200) % 11, "test_x": np.arange(50) % 11})
    dataset = load_dataset("mine")
    assert (dataset.kind, dataset.num_classes) == ("text", 11)
    split = validation_split(dataset, 4, 0, block=8)
    (batch,) = next(iter(SharedBatchIterator(split, [[0]], 2, steps_per_epoch=1, seed=0)))
    assert torch.equal((batch.x + 1) % 11, batch.y)


@pytest.mark.usefixtures("registered")
def test_a_function_is_called_once_and_only_when_its_data_is_needed() -> None:
    calls = []
    register_dataset("mine", lambda: calls.append(1) or arrays((4,)))
    assert (calls, dataset_facts("mine")) == ([], None)
    assert load_dataset("mine") is load_dataset("mine")
    assert calls == [1]
    assert dataset_facts("mine") == ("vector", (4,), 3)


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({"train_x": None}, {}, "array 'train_x' is missing"),
        ({"test_y": None}, {}, "array 'test_y' is missing; wanted: test_x, test_y, train_x, train_y"),
        ({"val_x": np.zeros(3)}, {}, "array 'val_x' is not expected"),
        ({"train_x": np.zeros((40, 8, 8), np.float32)}, {}, r"float32 of shape \(40, 8, 8\).*uint8 images"),
        ({"test_x": np.zeros((10, 4, 4), np.uint8)}, {}, r"test_x \(10, 4, 4\).*of the same shape"),
        ({"test_x": np.zeros((0, 8, 8), np.uint8)}, {}, "one or more samples each"),
        ({"train_y": np.zeros(39, int)}, {}, r"train_y is int64 of shape \(39,\), must be 40 integers"),
        ({"train_y": np.zeros(40)}, {}, "train_y is float64"),
        ({"train_y": np.arange(40) - 1}, {}, "labels from -1 to 38; allowed: 0 up"),
        ({}, {"classes": 2}, "labels from 0 to 2; allowed: 0 to 1"),
        ({}, {"classes": 2.5}, "classes is 2.5"),
        ({}, {"mean": (0.1, 0.2)}, r"mean is \(0.1, 0.2\); allowed: 1 numbers"),
        ({}, {"std": (0.0,)}, "std is .* above 0"),
        ({"train_x": np.full((40, 2), np.nan), "test_x": np.zeros((10, 2))}, {}, "train_x must hold finite"),
        (
            {"train_x": np.zeros((40, 1, 1, 1, 1)), "test_x": np.zeros((10, 1, 1, 1, 1))},
            {},
            "float64 of shape",
        ),
    ],
)
@pytest.mark.usefixtures("registered")
def test_arrays_that_cannot_be_used_are_refused(changes: dict, options: dict, words: str) -> None:
    data = {key: value for key, value in (arrays((8, 8)) | changes).items() if value is not None}
    with pytest.raises(DataError, match=f"dataset 'mine': .*{words}"):
        register_dataset("mine", data, **options)
    assert "mine" not in dataset_names()


@pytest.mark.usefixtures("registered")
def test_names_of_datasets_are_checked() -> None:
    register_dataset("mine", arrays((4,)))
    for name in ("mine", "digits", "synthetic", "cifar10"):
        with pytest.raises(DataError, match=f"'{name}' is already registered"):
            register_dataset(name, arrays((4,)))
    with pytest.raises(DataError, match="'My data'; allowed: lower-case"):
        register_dataset("My data", arrays((4,)))
    with pytest.raises(DataError, match=r"the data is a list, must be arrays by name"):
        register_dataset("other", [1, 2])
    with pytest.raises(DataError, match=r"'mime' is unknown \(did you mean mine\?\)"):
        load_dataset("mime")


def test_digits_flat_are_the_digits() -> None:
    images, flat = load_dataset("digits"), load_dataset("digits_flat")
    assert (flat.kind, flat.train_x.shape) == ("vector", (len(images.train_x), 64))
    assert torch.equal(flat.train_y, images.train_y)
    mean, std = images.mean[0], images.std[0]
    assert torch.allclose(flat.test_x, (images.test_x.flatten(1) / 16 - mean) / std, atol=1e-6)
