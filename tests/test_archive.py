"""Archives: whatever damage they have, it is found."""

from __future__ import annotations

from pathlib import Path

import torch

from esper._archive import read_archive, write_archive
from esper.leyline import StructureError


def test_a_flipped_bit_is_found_or_changes_nothing(tmp_path: Path) -> None:
    """In the header too: a changed number there would change how a run goes on."""
    file, tensors, meta = tmp_path / "a.safetensors", {"w": torch.arange(8.0)}, {"kind": "run", "lr": 0.125}
    write_archive(file, tensors, meta)
    whole, refused = file.read_bytes(), list[str]()
    for at in range(len(whole)):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        try:
            (stored, header) = read_archive(file, kind="run")
        except StructureError as error:
            refused.append(str(error))
        else:
            assert (header, stored.keys()) == (meta, tensors.keys()), f"byte {at}"
            assert torch.equal(stored["w"], tensors["w"]), f"byte {at}"
    assert len(refused) > 0.9 * len(whole)
    assert all("a.safetensors" in message for message in refused)


def test_a_file_without_a_digest_of_its_header_is_read(tmp_path: Path) -> None:
    """As older versions wrote it."""
    from esper.tamiyo.shipped import SHIPPED

    assert read_archive(next(iter(sorted(SHIPPED.glob("*.safetensors")))), kind="policy")[0]
