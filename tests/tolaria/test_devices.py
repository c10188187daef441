"""Device names: what is accepted, and what each refusal says."""

from __future__ import annotations

import pytest
import torch

from esper.leyline import EsperError
from esper.tolaria import validate_device


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A machine with (CUDA devices, mps or not)."""
    count, mps = request.param
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)


@pytest.mark.parametrize("machine", [(0, False)], indirect=True)
@pytest.mark.usefixtures("machine")
def test_cpu_is_always_there() -> None:
    assert validate_device("cpu") == torch.device("cpu")
    assert validate_device("cpu", require_index=True) == torch.device("cpu")


@pytest.mark.parametrize("machine", [(2, True)], indirect=True)
@pytest.mark.parametrize("text", ["cuda", "cuda:0", "cuda:1", "mps", "cpu"])
@pytest.mark.usefixtures("machine")
def test_what_the_machine_has(text: str) -> None:
    assert validate_device(text) == torch.device(text)


@pytest.mark.parametrize("machine", [(2, True)], indirect=True)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "CPU",
        " cpu",
        "cpu:",
        "cuda:",
        "cuda:-1",
        "cuda:01",
        "cuda:1.0",
        "cuda:0:1",
        "gpu",
        "meta",
        "xla:0",
        "cuda:0\n",
    ],
)
@pytest.mark.usefixtures("machine")
def test_malformed_or_unknown(text: str) -> None:
    with pytest.raises(
        EsperError, match=r"malformed or of an unknown kind; allowed: cpu, cuda:N, mps"
    ) as error:
        validate_device(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize("machine", [(2, True)], indirect=True)
@pytest.mark.usefixtures("machine")
def test_a_bare_cuda_where_an_index_is_required() -> None:
    with pytest.raises(EsperError, match=r"'cuda' has no number; write cuda:N"):
        validate_device("cuda", require_index=True)


@pytest.mark.parametrize(
    ("machine", "text", "here"),
    [
        ((2, False), "cuda:2", "cpu, cuda:0, cuda:1"),
        ((0, False), "cuda:0", "cpu"),
        ((0, False), "cuda", "cpu"),
        ((1, True), "cuda:99999999999999999999", "cpu, cuda:0, mps"),
    ],
    indirect=["machine"],
)
@pytest.mark.usefixtures("machine")
def test_a_device_that_does_not_exist(text: str, here: str) -> None:
    with pytest.raises(EsperError, match=f"does not exist.*allowed: {here}$"):
        validate_device(text)


@pytest.mark.parametrize("machine", [(0, False)], indirect=True)
@pytest.mark.usefixtures("machine")
def test_mps_that_is_not_available() -> None:
    with pytest.raises(EsperError, match=r"'mps' is not available on this machine; allowed: cpu$"):
        validate_device("mps")


@pytest.mark.parametrize("machine", [(2, True)], indirect=True)
@pytest.mark.parametrize("text", ["cpu:0", "mps:0", "mps:1"])
@pytest.mark.usefixtures("machine")
def test_devices_without_index(text: str) -> None:
    with pytest.raises(EsperError, match="has no index; allowed: "):
        validate_device(text)
