"""The folded CRC-32 equals zlib's, for every length and alignment; on the CPU here, on a GPU with `-m gpu`."""

from __future__ import annotations

import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchdirect.engines import device_checksum


@given(st.binary(max_size=3000), st.sampled_from([2, 4, 16, 64]), st.sampled_from([1, 2]))
@settings(max_examples=200, deadline=None)
def test_folding_keeps_the_crc(data: bytes, row_words: int, residue_words: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_checksum, "ROW_WORDS", row_words)
        patch.setattr(device_checksum, "RESIDUE_WORDS", residue_words)
        tensor = torch.tensor(list(data), dtype=torch.uint8)
        assert device_checksum.crc32(tensor) == zlib.crc32(data)


@given(st.integers(0, 0xFFFFFFFF), st.integers(0, 5000))
@settings(deadline=None)
def test_advance_is_zero_bytes(register: int, nbytes: int) -> None:
    # zlib inverts the register before and after.
    assert device_checksum.advance(register, nbytes) == zlib.crc32(bytes(nbytes), register ^ 0xFFFFFFFF) ^ 0xFFFFFFFF


def test_without_device_memory_the_host_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_words: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(device_checksum, "fold", refuse)
    data = bytes(range(256)) * 50
    assert device_checksum.crc32(torch.tensor(list(data), dtype=torch.uint8)) == zlib.crc32(data)


@pytest.mark.gpu
@pytest.mark.parametrize("nbytes", [1, 3, 4096, (8 << 20) + 1, (40 << 20) + 7, 100_000_003])
def test_on_a_gpu(nbytes: int) -> None:
    tensor = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
    assert device_checksum.crc32(tensor) == zlib.crc32(tensor.cpu().numpy().tobytes())
