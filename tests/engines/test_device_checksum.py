"""The folded CRC-32 equals zlib's, for every length and alignment; on the CPU here, on a GPU with `-m gpu`."""

from __future__ import annotations

import zlib
from collections.abc import Callable

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


def fold_rows(nbytes: int) -> Callable[..., torch.Tensor]:
    """Return what the compiled kernel computes, made of plain integers."""

    def kernel(*rows: torch.Tensor) -> torch.Tensor:
        columns = [[word & 0xFFFFFFFF for word in row.tolist()] for row in rows]
        folded = columns[0]
        for row in columns[1:]:
            folded = [device_checksum.advance(a, nbytes) ^ b for a, b in zip(folded, row, strict=True)]
        return torch.tensor([w - (1 << 32) if w >> 31 else w for w in folded], dtype=torch.int32)

    return kernel


@given(st.binary(min_size=64, max_size=3000), st.sampled_from([8, 16]))
@settings(max_examples=50, deadline=None)
def test_rows_for_the_compiled_kernel_keep_the_crc(data: bytes, row_words: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_checksum, "COMPILED_ROW_WORDS", row_words)
        patch.setattr(device_checksum, "_compiled", fold_rows)
        patch.setattr(device_checksum, "fold", device_checksum.fold_compiled)
        tensor = torch.tensor(list(data), dtype=torch.uint8)
        assert device_checksum.crc32_of_all([tensor, tensor[:64]]) == [zlib.crc32(data), zlib.crc32(data[:64])]


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


@pytest.mark.gpu
@pytest.mark.parametrize("nbytes", [2 << 20, (16 << 20) + 4096, 100_000_003])
def test_the_compiled_kernel_on_a_gpu(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_checksum, "COMPILE_FROM", 0)
    monkeypatch.setattr(device_checksum, "fold", None)  # no way around the kernel
    tensor = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
    assert device_checksum.crc32(tensor) == zlib.crc32(tensor.cpu().numpy().tobytes())
