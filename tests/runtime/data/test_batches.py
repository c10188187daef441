"""Batches: every number against a loop over single samples, and independence of everything that must not
matter."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esper.leyline.rng import stream_seed
from esper.runtime.data import (
    Batch,
    DataError,
    Dataset,
    EvalBatches,
    SharedBatchIterator,
    Split,
    batches,
    fuse_shared,
    load_dataset,
    synthetic_dataset,
    validation_batches,
    validation_split,
)

SMALL = synthetic_dataset((3, 6, 5), num_classes=4, train=50, test=11)  # not square: mixed up axes would show
SEED = 5


def small_split(val_size: int = 7) -> Split:
    return validation_split(SMALL, val_size, SEED)


def make(
    split: Split, groups: list[list[int]], *, pad: int = 2, flip: bool = True, **options: object
) -> SharedBatchIterator:
    arguments = {"batch_size": 8, "steps_per_epoch": 4, "seed": SEED, **options}
    split = replace(split, dataset=replace(split.dataset, pad=pad, flip=flip))
    return SharedBatchIterator(split, groups, arguments.pop("batch_size"), **arguments)


def text_split(block: int = 8, val_size: int = 5) -> Split:
    tokens = torch.randint(0, 256, (1000,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    data = Dataset(
        name="text",
        kind="text",
        train_x=tokens,
        train_y=tokens[1:],
        test_x=tokens[:100],
        test_y=tokens[1:100],
        num_classes=256,
    )
    return validation_split(data, val_size, SEED, block=block)


def row(batch: Batch, p: int, rows: int) -> tuple[Tensor, Tensor]:
    """What row p of a population sees: [B, C, H, W] and [B]."""
    channels = batch.x.shape[1] // rows
    return batch.x[:, p * channels : (p + 1) * channels], batch.y[p]


def env_history(
    groups: list[list[int]], rows: list[int], env: int, epochs: int = 3, **conditions: object
) -> list[tuple]:
    iterator = make(small_split(), groups, rows=rows)
    iterator.begin_episode(2, **conditions)
    group = next(i for i, members in enumerate(groups) if env in members)
    seen = []
    for _ in range(epochs):
        seen += [row(step[group], groups[group].index(env), rows[group]) for step in iterator]
    return seen


def equal(a: list[tuple], b: list[tuple]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(t, u) for x, y in zip(a, b, strict=True) for t, u in zip(x, y, strict=True)
    )


def test_env_sees_the_same_whatever_runs_beside_it() -> None:
    alone = env_history([[3]], [1], 3)
    assert len(alone) == 12
    assert equal(alone, env_history([[3]], [8], 3))
    assert equal(alone, env_history([[0, 1, 2, 3]], [8], 3))
    assert equal(alone, env_history([list(range(16))], [16], 3))
    assert equal(alone, env_history([[9, 3, 1], [5, 2]], [8, 8], 3))
    assert equal(alone, env_history([[5, 2], [3]], [16, 1], 3))
    assert not equal(alone, env_history([[4]], [1], 4))


def test_only_some_rows_are_gathered() -> None:
    """Rows in any order, repeated, and none at all; from the next epoch on, all of them again."""
    whole, part = (make(small_split(), [[3, 4, 5], [6]], rows=[8, 8]) for _ in range(2))
    chosen = [2, 0, 2, 7]
    for rows in ([chosen, []], [None, [0]]):
        part.gather(rows)
        for (all_first, all_second), (first, second) in zip(whole, part, strict=True):
            for place, p in enumerate(rows[0] or range(8)):
                assert equal([row(all_first, p, 8)], [row(first, place, len(rows[0] or range(8)))])
            if rows[1]:
                assert equal([row(all_second, 0, 8)], [row(second, 0, 1)])
            else:
                assert second.x.numel() == second.y.numel() == 0


@pytest.mark.parametrize("length", [4, 150])
def test_rows_may_change_within_an_epoch_whose_rest_is_left_out(length) -> None:
    """Epochs shorter and longer than what is drawn at once; each ends after three quarters."""
    whole, part = (make(small_split(), [[3, 4, 5]], rows=[8], steps_per_epoch=length) for _ in range(2))
    for _ in range(3):
        every, some = list(whole), iter(part)
        for step in range(length * 3 // 4):
            if step == 0:
                part.gather([[0, 1, 2]])
            elif step == length // 2:
                part.gather([[2]])
            ((all_rows,), (batch,)) = every[step], next(some)
            for place, p in enumerate([2] if step >= length // 2 else [0, 1, 2]):
                count = 1 if step >= length // 2 else 3
                assert equal([row(all_rows, p, 8)], [row(batch, place, count)])
        part.skip_epoch()
        assert part.epoch_done
        part.skip_epoch()  # nothing is left of this epoch


@pytest.mark.parametrize("rows", [[[0]], [[0], [8]], [[-1], None]])
def test_rows_to_gather_must_exist(rows) -> None:
    with pytest.raises(DataError, match="rows to gather"):
        make(small_split(), [[3], [6]], rows=[8, 8]).gather(rows)


def test_images_and_labels_equal_a_loop_over_samples() -> None:
    """Permutation, crop, mirroring and normalisation of two envs, one sample at a time, over several
    permutations."""
    split, pad, rows = small_split(), 2, 2
    iterator = make(split, [[4, 9]], batch_size=6, steps_per_epoch=5, pad=pad)
    iterator.begin_episode(3)
    steps = [batch for _ in range(5) for [batch] in iterator]
    pool = split.train
    side = 2 * pad + 1
    for p, env in enumerate((4, 9)):
        position = 0
        for batch in steps:
            x, y = row(batch, p, rows)
            for b in range(6):
                number, offset = divmod(position, len(pool))
                order = np.random.default_rng(stream_seed(SEED, "data", 3, env, number)).permutation(
                    len(pool)
                )
                draws = np.random.default_rng(stream_seed(SEED, "augment", 3, env, number))
                sample, code = (
                    pool[order[offset]],
                    int(draws.integers(2 * side * side, size=len(pool))[offset]),
                )
                flip, dy, dx = code // (side * side), code // side % side, code % side
                image = SMALL.train_x[sample].numpy()
                padded = np.zeros((3, 6 + 2 * pad, 5 + 2 * pad))
                padded[:, pad : pad + 6, pad : pad + 5] = image
                crop = padded[:, dy : dy + 6, dx : dx + 5]
                if flip:
                    crop = crop[:, :, ::-1]
                expected = (crop / SMALL.scale - np.reshape(SMALL.mean, (3, 1, 1))) / np.reshape(
                    SMALL.std, (3, 1, 1)
                )
                np.testing.assert_allclose(x[b].numpy(), expected, rtol=0, atol=1e-5)
                assert y[b] == SMALL.train_y[sample]
                position += 1
    assert position > 3 * len(pool)


@pytest.mark.parametrize(
    ("name", "pad", "flip"),
    [
        ("digits", 0, False),
        ("digits", 1, True),
        ("synthetic:2x4x6", 0, False),
        ("synthetic:4x4x4", 1, False),
        ("synthetic:5x3x3", 0, True),
    ],
)
def test_every_kind_of_image_is_normalised_and_laid_out(name: str, pad: int, flip: bool) -> None:
    data = load_dataset(name)
    split = validation_split(data, 10, SEED)
    iterator = make(split, [[0, 1, 2]], rows=[8], batch_size=4, pad=pad, flip=flip)
    [batch] = next(iter(iterator))
    channels, height, width = data.train_x.shape[1:]
    assert batch.x.shape == (4, 8 * channels, height, width)
    assert batch.x.dtype == torch.float32
    assert batch.x.is_contiguous(memory_format=torch.channels_last)
    assert batch.y.shape == (8, 4)
    assert batch.y.dtype == torch.int64
    assert batch.y.is_contiguous()
    if not pad and not flip:
        order = np.random.default_rng(stream_seed(SEED, "data", 0, 1, 0)).permutation(len(split.train))
        chosen = split.train[order[:4]]
        mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (data.mean, data.std))
        expected = (data.train_x[chosen].float() / data.scale - mean) / std
        torch.testing.assert_close(row(batch, 1, 8)[0], expected, rtol=0, atol=1e-5)


def test_idle_rows_repeat_the_first_env() -> None:
    for [batch] in make(small_split(), [[6, 2]], rows=[8]):
        for p in range(2, 8):
            assert torch.equal(row(batch, p, 8)[0], row(batch, 0, 8)[0])
            assert torch.equal(batch.y[p], batch.y[0])
        assert not torch.equal(row(batch, 1, 8)[0], row(batch, 0, 8)[0])


def sample_numbers(iterator: SharedBatchIterator, count: int) -> list[int]:
    """Which training samples of SMALL the first env saw, found by their pixels."""
    known = {image.float().numpy().tobytes(): i for i, image in enumerate(SMALL.train_x)}
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) * SMALL.scale for v in (SMALL.mean, SMALL.std))
    found: list[int] = []
    while len(found) < count:
        for [batch] in iterator:
            raw = (row(batch, 0, batch.y.shape[0])[0] * std + mean).round()
            found += [known[image.contiguous().numpy().tobytes()] for image in raw]
    return found[:count]


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 20), st.integers(1, 7), st.integers(0, 20))
def test_every_sample_comes_once_per_permutation(batch_size: int, steps: int, val_size: int) -> None:
    split = small_split(val_size)
    iterator = make(split, [[0]], batch_size=batch_size, steps_per_epoch=steps, pad=0, flip=False)
    size = len(split.train)
    seen = sample_numbers(iterator, 3 * size)
    orders = [seen[k * size : (k + 1) * size] for k in range(3)]
    assert all(sorted(order) == split.train.tolist() for order in orders)
    assert orders[0] != orders[1] != orders[2]


def test_an_epoch_has_steps_per_epoch_steps_and_episodes_differ() -> None:
    iterator = make(small_split(), [[0]])
    assert len(iterator) == 4
    first = [b.x for [b] in iterator]
    assert len(first) == 4
    assert not torch.equal(first[0], next(iter(iterator))[0].x)
    iterator.begin_episode(1)
    assert not torch.equal(first[0], next(iter(iterator))[0].x)
    iterator.begin_episode(0)
    assert torch.equal(first[0], next(iter(iterator))[0].x)


@pytest.mark.parametrize("kind", ["image", "text"])
@pytest.mark.parametrize("stop", [0, 1, 3, 4, 5, 11, 23, 24])
def test_save_and_restore_anywhere(stop: int, kind: str) -> None:
    """24 steps of 8 samples: several permutations of 43 images, stops within an epoch, at its end and within
    a permutation."""
    split = small_split() if kind == "image" else text_split()
    conditions = {"train_size": [30, 40], "label_noise": [0.5 if kind == "image" else 0.0, 0.0]}

    def walk(iterator: SharedBatchIterator, count: int) -> list[tuple]:
        steps: list[tuple] = []
        while len(steps) < count:
            for groups in iterator:
                steps.append(tuple(t for batch in groups for t in batch))
                if len(steps) == count:
                    break
        return steps

    straight = make(split, [[0], [1]], rows=[1, 8])
    straight.begin_episode(7, **conditions)
    expected = walk(straight, 28)
    first = make(split, [[0], [1]], rows=[1, 8])
    first.begin_episode(7, **conditions)
    walk(first, stop)
    saved = json.loads(json.dumps(first.state()))
    second = make(split, [[0], [1]], rows=[1, 8])
    second.load_state(saved)
    assert equal(expected[stop:], walk(second, 28 - stop))
    assert second.state() == straight.state()


def test_restored_epoch_ends_where_it_would_have() -> None:
    iterator = make(small_split(), [[0]])
    for _ in iterator:
        break
    other = make(small_split(), [[0]])
    other.load_state(iterator.state())
    assert len(list(other)) == 3
    assert len(list(other)) == 4


@pytest.mark.parametrize(
    "field", ["dataset", "samples", "batch_size", "steps_per_epoch", "seed", "envs", "codes"]
)
def test_foreign_position_names_the_field(field: str) -> None:
    iterator = make(small_split(), [[0]])
    with pytest.raises(DataError, match=f"saved data position has {field} 'x', this run has"):
        iterator.load_state({**iterator.state(), field: "x"})
    short = iterator.state()
    del short["step"]
    with pytest.raises(DataError, match="saved data position lacks step"):
        iterator.load_state(short)


def test_train_size_draws_nested_pools_per_env_and_episode() -> None:
    def pool(size: int, env: int, episode: int) -> set[int]:
        iterator = make(small_split(), [[env]], pad=0, flip=False)
        iterator.begin_episode(episode, train_size=[size])
        numbers = sample_numbers(iterator, 3 * size)
        assert set(Counter(numbers).values()) == {3}
        return set(numbers)

    small, large = pool(10, 0, 0), pool(25, 0, 0)
    assert len(small) == 10
    assert small < large < set(small_split().train.tolist())
    assert small != pool(10, 1, 0)
    assert small != pool(10, 0, 1)


def test_label_noise_flips_the_asked_share_once_per_episode() -> None:
    data = load_dataset("digits")
    split = validation_split(data, 47, SEED)

    def labels(noise: float, env: int = 0, episode: int = 0) -> np.ndarray:
        """Label by sample, over two whole permutations, which must agree."""
        iterator = make(split, [[env]], batch_size=100, steps_per_epoch=13, pad=0, flip=False)
        iterator.begin_episode(episode, label_noise=[noise])
        result = np.full((2, 1347), -1)
        for k in range(2):
            order = np.random.default_rng(stream_seed(SEED, "data", episode, env, k)).permutation(1300)
            result[k, split.train[order]] = torch.cat([b.y[0] for [b] in iterator]).numpy()
        assert np.array_equal(result[0], result[1])
        return result[0][split.train]

    true = data.train_y.numpy()[split.train]
    assert np.array_equal(labels(0.0), true)
    noisy = labels(0.3)
    assert (noisy != true).sum() == 390
    places = np.random.default_rng(stream_seed(SEED, "condition", 0, 0, 2)).permutation(1300)[:390]
    assert np.array_equal(np.flatnonzero(noisy != true), np.sort(places))
    assert noisy.min() == 0
    assert noisy.max() == 9
    assert np.array_equal(noisy, labels(0.3))
    assert not np.array_equal(noisy, labels(0.3, env=1))
    assert not np.array_equal(noisy, labels(0.3, episode=1))
    assert (labels(1.0) != true).all()


def test_noise_of_one_env_or_episode_leaves_the_others_clean() -> None:
    def labels(iterator: SharedBatchIterator) -> tuple[Tensor, Tensor]:
        y = torch.cat([batch.y for [batch] in iterator], 1)
        return y[0], y[1]

    iterator = make(small_split(), [[0, 1]])
    true = labels(iterator)
    iterator.begin_episode(0, label_noise=[0.9, 0.0])
    noisy, clean = labels(iterator)
    assert not torch.equal(noisy, true[0])
    assert torch.equal(clean, true[1])
    iterator.begin_episode(0)
    assert torch.equal(labels(iterator)[0], true[0])


def test_conditions_belong_to_an_env_not_to_its_place() -> None:
    alone = env_history([[3]], [1], 3, train_size=[20], label_noise=[0.5])
    beside = env_history([[1, 3], [7]], [8, 1], 3, train_size=[43, 20, 5], label_noise=[0.0, 0.5, 0.9])
    assert equal(alone, beside)


def test_text_batches_equal_a_loop() -> None:
    split = text_split(block=8)
    tokens = split.dataset.train_x.long()
    iterator = SharedBatchIterator(split, [[2, 0]], 5, steps_per_epoch=30, seed=SEED, rows=[8])
    starts: list[list[int]] = [[], []]
    for [batch] in iterator:
        assert batch.x.shape == batch.y.shape == (8, 5, 8)
        assert batch.x.dtype == batch.y.dtype == torch.int64
        assert torch.equal(batch.x[7], batch.x[0])
        for p, env in enumerate((2, 0)):
            for b in range(5):
                number, offset = divmod(len(starts[p]), len(split.train))
                order = np.random.default_rng(stream_seed(SEED, "data", 0, env, number)).permutation(
                    len(split.train)
                )
                shift = int(np.random.default_rng(stream_seed(SEED, "augment", 0, env, number)).integers(8))
                start = int(order[offset]) * 8 + shift
                assert torch.equal(batch.x[p, b], tokens[start : start + 8])
                assert torch.equal(batch.y[p, b], tokens[start + 1 : start + 9])
                starts[p].append(start)
    size = len(split.train)
    assert sorted(starts[0][:size]) == list(range(min(starts[0][:size]), size * 8, 8))  # every token once


def test_validation_and_test_batches() -> None:
    split = small_split(7)
    val = validation_batches(split, 3)
    assert [len(b.x) for b in val] == [3, 3, 1]
    assert len(val) == 3
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (SMALL.mean, SMALL.std))
    for part, images, labels in (
        (val, SMALL.train_x[split.val], SMALL.train_y[split.val]),
        (batches.test_batches(split, 4), SMALL.test_x, SMALL.test_y),
    ):
        x = torch.cat([b.x for b in part])
        torch.testing.assert_close(x, (images.float() / 255 - mean) / std, rtol=0, atol=1e-5)
        assert torch.equal(torch.cat([b.y for b in part], 1)[0], labels)


@pytest.mark.parametrize("shape", [(3, 6, 5), (1, 6, 5), (1, 64, 64)], ids=["colour", "grey", "large grey"])
def test_validation_images_have_the_bits_of_training_images(shape: tuple[int, ...]) -> None:
    """However a set is kept in memory, a normalised pixel is the same float32."""
    data = synthetic_dataset(shape, train=1100, test=1)
    split = Split(dataset=data, train=np.arange(1100), val=np.arange(1100), final=np.arange(1100))
    iterator = make(split, [[0, 1]], batch_size=1100, steps_per_epoch=1, pad=0, flip=False)
    [batch] = next(iter(iterator))
    order = np.random.default_rng(stream_seed(SEED, "data", 0, 1, 0)).permutation(1100)
    [val] = list(validation_batches(split, 1100))
    assert torch.equal(row(batch, 1, 2)[0], val.x[order])


@pytest.mark.parametrize("rows", [1, 3, 8, 16])
@pytest.mark.parametrize("channels", [1, 3])
def test_shared_batches_fill_every_row(rows: int, channels: int) -> None:
    x = torch.randn(4, channels, 6, 5)
    fused = fuse_shared(x, rows)
    assert fused.shape == (4, rows * channels, 6, 5)
    assert fused.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(fused, x.repeat(1, rows, 1, 1))
    for one, many in zip(
        validation_batches(small_split(), 4), validation_batches(small_split(), 4).batches(rows), strict=True
    ):
        assert torch.equal(many.x, one.x.repeat(1, rows, 1, 1))
        assert many.x.is_contiguous(memory_format=torch.channels_last)
        assert many.y.shape == (rows, one.y.shape[1])
        assert torch.equal(many.y, one.y.repeat(rows, 1))


def test_text_validation_and_test() -> None:
    split = text_split(block=8, val_size=5)
    tokens = split.dataset.train_x.long()
    for batch in validation_batches(split, 5).batches(8):
        assert batch.x.shape == (8, 5, 8)
        begin = int(split.val[0]) * 8
        assert torch.equal(batch.x[3].reshape(-1), tokens[begin : begin + 40])
        assert torch.equal(batch.y[7].reshape(-1), tokens[begin + 1 : begin + 41])
    x = torch.cat([b.x[0] for b in batches.test_batches(split, 5)])
    assert torch.equal(x.reshape(-1), split.dataset.test_x.long()[:96])


def test_training_never_touches_validation() -> None:
    split = small_split(20)
    seen = set(sample_numbers(make(split, [[0]], pad=0, flip=False), 60))
    assert seen == set(split.train.tolist())
    assert not seen & set(split.val.tolist())


def test_batches_are_fresh_memory() -> None:
    kept = [b.x for [b] in make(small_split(), [[0, 1]])]
    copies = [x.clone() for x in kept]
    assert len({x.data_ptr() for x in kept}) == 4
    kept[0].zero_()
    assert torch.equal(kept[1], copies[1])


def test_no_global_generator_is_touched() -> None:
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    list(make(small_split(), [[0, 1]]))
    assert torch.equal(before, torch.get_rng_state())
    assert np.array_equal(numpy_before, np.random.get_state()[1])  # noqa: NPY002


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size 0, steps_per_epoch 4; allowed: ≥ 1"),
        ({"steps_per_epoch": 0}, "batch_size 8, steps_per_epoch 0; allowed: ≥ 1"),
        ({"rows": [1]}, r"rows \(1,\) for groups \(\(0, 1\),\); allowed: one number per group"),
        ({"rows": [8, 8]}, r"rows \(8, 8\)"),
        ({"pad": -1}, "pad -1; allowed: 1 to 8 channels, pad ≥ 0"),
    ],
)
def test_bad_settings(options: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make(small_split(), [[0, 1]], **options)


@pytest.mark.parametrize("groups", [[], [[]]])
def test_bad_groups(groups: list[list[int]]) -> None:
    with pytest.raises(DataError, match="one or more groups of one or more envs"):
        make(small_split(), groups)


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        ({"train_size": [0, 5]}, r"train_size \[0, 5\]; allowed: 1 to 43"),
        ({"train_size": [44, None]}, r"train_size \[44, 43\]; allowed: 1 to 43"),
        (
            {"train_size": [5]},
            r"train_size \[5\], label_noise \[0.0, 0.0\]; allowed: one value for each of 2 envs",
        ),
        ({"label_noise": [0.1, 1.5]}, r"label_noise \[0.1, 1.5\]; allowed: 0 to 1"),
        ({"label_noise": [0.0, float("nan")]}, r"label_noise \[0.0, nan\]; allowed: 0 to 1"),
    ],
)
def test_bad_conditions(conditions: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make(small_split(), [[0, 1]]).begin_episode(0, **conditions)


def test_other_bad_input() -> None:
    with pytest.raises(DataError, match="images with 9 channels"):
        make(validation_split(synthetic_dataset((9, 2, 2), train=20, test=5), 0, 0), [[0]])
    with pytest.raises(DataError, match=r"label_noise \[0.5\] with text; allowed: 0"):
        SharedBatchIterator(text_split(), [[0]], 4, steps_per_epoch=1, seed=0).begin_episode(
            0, label_noise=[0.5]
        )
    with pytest.raises(DataError, match="batch_size 0; allowed: ≥ 1"):
        EvalBatches(SMALL.test_x, SMALL.test_y, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_preloaded_on_the_device_gives_the_same_samples() -> None:
    split = small_split()
    preloaded = validation_split(SMALL.to("cuda"), 7, SEED)
    for [here], [there], [moved] in zip(
        make(split, [[0, 1]]), make(preloaded, [[0, 1]]), make(split, [[0, 1]], device="cuda"), strict=True
    ):
        assert there.x.device.type == moved.x.device.type == "cuda"
        assert torch.equal(moved.x.cpu(), here.x)
        torch.testing.assert_close(there.x.cpu(), here.x)
        assert torch.equal(there.y.cpu(), here.y)


def test_an_env_that_is_named_twice_gets_the_same_batches_twice() -> None:
    for pair, alone in make(small_split(), [[3, 3], [3]]):
        assert torch.equal(pair.y[0], pair.y[1])
        assert torch.equal(pair.y[:1], alone.y)
