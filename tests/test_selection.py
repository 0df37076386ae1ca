"""Which transfer type a call takes: a table of decisions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from torchdirect import selection
from torchdirect.errors import TransferUnavailableError
from torchdirect.selection import Situation
from torchdirect.system import DirectIO
from torchdirect.transfer import TransferReport, TransferType
from torchdirect.units import MIB, format_bytes

DIRECT, REFUSED = DirectIO(True, 512, 512, "statx"), DirectIO(False, 1, 1, "no direct I/O")
SAVE = Situation("save", 10 << 30, 100, True, False, DIRECT, "ext4", False, 0.0, True, 64 << 30, 16)
LOAD = replace(SAVE, operation="load")


@pytest.mark.parametrize(
    ("situation", "expected", "reason"),
    [
        (SAVE, "CPU_ASYNC_GPU", "accepts O_DIRECT"),
        (replace(SAVE, gds=True), "GDS", "by DMA"),
        (replace(SAVE, on_gpu=False, on_host=True), "CPU_ONLY", "accepts O_DIRECT"),
        (replace(SAVE, on_host=True), "CPU_ASYNC_GPU", ""),
        (replace(SAVE, in_memory=True, file_system="tmpfs"), "CPU_CACHED_GPU", "tmpfs keeps its files in memory"),
        (replace(SAVE, direct_io=REFUSED), "CPU_CACHED_GPU", "does not accept O_DIRECT: no direct I/O"),
        (replace(SAVE, nbytes=1000), "CPU_CACHED_GPU", "small"),
        (replace(SAVE, durable=False), "CPU_ASYNC_GPU", ""),
        (replace(SAVE, durable=False, nbytes=1 << 30), "CPU_CACHED_GPU", "durable=False"),
        (LOAD, "CPU_ASYNC_GPU", "not in the page cache"),
        (replace(LOAD, cached=0.97), "CPU_CACHED_GPU", "97% of the file is in the page cache"),
        (replace(LOAD, cached=0.97, gds=True), "CPU_CACHED_GPU", "page cache"),
        (replace(LOAD, cached=0.2, gds=True), "GDS", "by DMA"),
        (replace(LOAD, on_gpu=False, on_host=True, gds=True), "CPU_ONLY", ""),
    ],
)
def test_automatic_choice(situation: Situation, expected: str, reason: str) -> None:
    choice = selection.choose(situation)
    assert choice.transfer_type is TransferType[expected]
    assert reason in choice.reason
    if situation.nbytes > MIB:
        selection.check(choice.transfer_type, situation)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("CPU_ONLY", {}, "tensors on a GPU"),
        ("CPU_GPU", {"on_gpu": False, "on_host": True}, "no tensor is on a GPU"),
        ("CPU_ASYNC_GPU", {"on_gpu": False, "on_host": True}, "no tensor is on a GPU"),
        ("GDS", {"on_gpu": False, "on_host": True}, "no tensor is on a GPU"),
        ("CPU_ASYNC_GPU", {"direct_io": REFUSED}, "O_DIRECT: no direct I/O"),
    ],
)
def test_types_that_cannot_carry_a_call(name: str, change: dict[str, Any], reason: str) -> None:
    with pytest.raises(TransferUnavailableError, match=f"{name} is not available: .*{reason}") as caught:
        selection.check(TransferType[name], replace(SAVE, **change))
    assert caught.value.remedy


def test_threads_and_chunks() -> None:
    def sizes(transfer_type: str, **change: Any) -> tuple[int, int]:
        situation = replace(LOAD, **change)
        return selection.threads_and_chunk(TransferType[transfer_type], situation, None, None, 256 * MIB)

    assert sizes("CPU_ASYNC_GPU") == (8, 8 * MIB)
    assert sizes("CPU_CACHED_GPU") == (10, 4 * MIB)
    assert sizes("CPU_CACHED_GPU", on_gpu=False, on_host=True) == (12, 8 * MIB)
    assert sizes("CPU_CACHED_GPU", cpus=2) == (2, 4 * MIB)
    assert sizes("CPU_ASYNC_GPU", cpus=2) == (4, 8 * MIB)
    assert sizes("CPU_CACHED_GPU", nbytes=20 * MIB) == (6, 4 * MIB)
    assert sizes("CPU_CACHED_GPU", nbytes=320 * MIB, storages=20_000) == (2, 4 * MIB)
    limited = selection.threads_and_chunk(TransferType.CPU_ASYNC_GPU, LOAD, None, None, 8 * MIB)
    assert limited == (8, 2 * MIB)
    assert selection.threads_and_chunk(TransferType.GDS, LOAD, 5, MIB, 256 * MIB) == (5, MIB)


def test_reports() -> None:
    report = TransferReport("load", "a.pt", TransferType.AUTO, TransferType.GDS, "why", 4_000_000_000, 1, 2.0, 8, MIB)
    assert report.gb_per_s == 2.0
    assert report.road == "torchdirect"
    assert "load a.pt: 4.00 GB in 2.000 s, 2.00 GB/s" in str(report)
    assert "cuFile compatibility mode" in str(replace(report, direct=False))
    assert ", direct;" in str(replace(report, direct=True))
    elsewhere = replace(report, used=None, fallbacks=("first", "second"), seconds=0.0)
    assert (elsewhere.road, elsewhere.gb_per_s) == ("torch", 0.0)
    assert str(elsewhere).endswith("  fallback: first\n  fallback: second")


def test_transfer_types_are_gdsios() -> None:
    assert [t.name for t in sorted(TransferType)] == [
        "AUTO", "GDS", "CPU_ONLY", "CPU_GPU", "CPU_ASYNC_GPU", "CPU_CACHED_GPU", "GPU_ASYNC", "GPU_BATCH"
    ]  # fmt: skip
    assert [int(t) for t in sorted(TransferType)] == list(range(-1, 7))
    for t in TransferType:
        assert TransferType.parse(t.name.lower()) is TransferType.parse(t) is t
        assert t is TransferType.AUTO or TransferType.parse(str(int(t))) is TransferType.parse(int(t)) is t


def test_sizes_as_text() -> None:
    assert [format_bytes(n) for n in (0, 999, 1000, 8_388_608, 2.5e9, 3e15)] == [
        "0 B", "999 B", "1.00 kB", "8.39 MB", "2.50 GB", "3000.00 TB"
    ]  # fmt: skip
