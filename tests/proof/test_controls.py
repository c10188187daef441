"""Controls: reversed prices, hidden quotes, and the epochs and blueprints of a learned policy's seeds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from esper.leyline import GerminationStyle, ObjectiveConfig, PolicyObservation
from esper.proof.controls import OFFERED, Amount, amounts, hide_quotes, reversed_prices
from esper.proof.episodes import Decision, Fossil
from esper.runtime.worlds import SIZE_PRICES
from esper.tamiyo.features import BASE_DIM, QUOTE_DIM, SLOT_DIM
from proof.worlds import played


def test_amounts_are_the_permanent_seeds_at_the_epoch_of_their_last_germination() -> None:
    decisions = (
        Decision(1, "GERMINATE", "r0c0", "norm"),
        Decision(3, "PRUNE", "r0c0", None),
        Decision(4, "GERMINATE", "r0c1", "conv_light"),
        Decision(6, "GERMINATE", "r0c0", "residual"),
        Decision(7, "GERMINATE", "r1c0", "norm"),
    )
    fossils = (Fossil("r0c0", "residual", "GATE"), Fossil("r0c1", "conv_light", "ADD"))
    found = amounts(replace(played(0, 0.5), decisions=decisions, fossils=fossils))
    assert found == (
        Amount(4, "conv_light", GerminationStyle.SIGMOID_ADD),
        Amount(6, "residual", GerminationStyle(3)),
    )


def test_reversed_prices_fall_as_prices_rise() -> None:
    low, high = SIZE_PRICES
    seen = [
        reversed_prices(ObjectiveConfig(size_price=price, waste_price=0.01)).size_price
        for price in (low, 0.01, high)
    ]
    assert seen == pytest.approx([high, low * high / 0.01, low])
    assert reversed_prices(ObjectiveConfig(size_price=0.0, waste_price=0.0)).size_price == high


def test_hidden_quotes_show_only_what_is_offered() -> None:
    quotes = torch.rand(2, 3, 4, QUOTE_DIM) + 0.5
    obs = PolicyObservation(
        base=torch.rand(2, BASE_DIM),
        slots=torch.rand(2, 3, SLOT_DIM),
        quotes=quotes,
        blueprints=torch.full((2, 3), -1),
    )
    hidden = hide_quotes(obs)
    assert torch.equal(hidden.quotes[..., OFFERED], quotes[..., OFFERED])
    others = [column for column in range(QUOTE_DIM) if column != OFFERED]
    assert not hidden.quotes[..., others].any()
    assert torch.equal(hidden.base, obs.base)
    assert torch.equal(obs.quotes, quotes), "the observation itself is unchanged"
