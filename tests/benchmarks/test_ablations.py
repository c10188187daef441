"""Every ablation changes the training that it is an ablation of."""

from __future__ import annotations

import pytest
from benchmarks.ablations import VARIANTS

from esper.simic.training.presets import resolve


@pytest.mark.parametrize("preset", ["digits_shift", "digits_impaired"])
def test_every_variant_is_another_training(preset) -> None:
    configs = [resolve(preset, None, change)[0] for change in VARIANTS.values()]
    assert all(one != other for i, one in enumerate(configs) for other in configs[:i])
