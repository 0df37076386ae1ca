"""Layouts against numbers that a C program printed from the real headers (libcufile 1.11, 1.14 and 1.15, x86-64)."""

from __future__ import annotations

import ctypes

import pytest

from torchdirect.cufile import structs

SIZES = {
    structs.Status: 8,
    structs.Descr: 24,
    structs.DrvProps: 56,
    structs.IOParams: 64,
    structs.IOEvents: 24,
    structs.OpCounter: 16,
    structs.StatsLevel1: 512,
    structs.StatsLevel2: 1024,
    structs.PerGpuStats: 248,
    structs.StatsLevel3: 5000,
    structs.Timespec: 16,
}

OFFSETS = {
    (structs.Status, "cu_err"): 4,
    (structs.Descr, "type"): 0,
    (structs.Descr, "handle"): 8,
    (structs.Descr, "fs_ops"): 16,
    (structs.DrvProps, "fflags"): 32,
    (structs.DrvProps, "max_device_cache_size"): 36,
    (structs.DrvProps, "per_buffer_cache_size"): 40,
    (structs.DrvProps, "max_device_pinned_mem_size"): 44,
    (structs.DrvProps, "max_batch_io_size"): 48,
    (structs.DrvProps, "max_batch_io_timeout_msecs"): 52,
    (structs._Nvfs, "minor_version"): 4,
    (structs._Nvfs, "poll_thresh_size"): 8,
    (structs._Nvfs, "max_direct_io_size"): 16,
    (structs._Nvfs, "dstatusflags"): 24,
    (structs._Nvfs, "dcontrolflags"): 28,
    (structs.IOParams, "mode"): 0,
    (structs.IOParams, "u"): 8,
    (structs._BatchRange, "file_offset"): 8,
    (structs._BatchRange, "devPtr_offset"): 16,
    (structs._BatchRange, "size"): 24,
    (structs.IOParams, "fh"): 40,
    (structs.IOParams, "opcode"): 48,
    (structs.IOParams, "cookie"): 56,
    (structs.IOEvents, "cookie"): 0,
    (structs.IOEvents, "status"): 8,
    (structs.IOEvents, "ret"): 16,
    (structs.StatsLevel1, "read_bytes"): 96,
    (structs.StatsLevel1, "batch_submit_ops"): 176,
    (structs.StatsLevel1, "batch_read_bytes"): 416,
    (structs.StatsLevel1, "last_batch_write_bytes"): 504,
    (structs.StatsLevel2, "read_size_kb_hist"): 512,
    (structs.StatsLevel2, "write_size_kb_hist"): 768,
    (structs.PerGpuStats, "read_bytes"): 16,
    (structs.PerGpuStats, "writes_bytes"): 120,
    (structs.PerGpuStats, "n_mmap"): 208,
    (structs.PerGpuStats, "reg_bytes"): 240,
    (structs.StatsLevel3, "num_gpus"): 1024,
    (structs.StatsLevel3, "per_gpu_stats"): 1032,
}


@pytest.mark.parametrize(("structure", "size"), SIZES.items())
def test_size(structure: type[ctypes.Structure], size: int) -> None:
    assert ctypes.sizeof(structure) == size


@pytest.mark.parametrize(("where", "offset"), OFFSETS.items())
def test_offset(where: tuple[type[ctypes.Structure], str], offset: int) -> None:
    structure, field = where
    assert getattr(structure, field).offset == offset


def test_parameter_enumerations_have_every_value_of_the_header() -> None:
    assert [*structs.SizeParameter] == [*range(12)]
    assert [*structs.BoolParameter] == [*range(12)]
    assert [*structs.StringParameter] == [*range(3)]
