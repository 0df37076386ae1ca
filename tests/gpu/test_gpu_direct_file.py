"""DirectFile with GPU tensors, on every transfer type that works here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import torchdirect as td
from torchdirect.gds_status import gds_status

pytestmark = pytest.mark.gpu
HOST = ["AUTO", "CPU_GPU", "CPU_ASYNC_GPU", "CPU_CACHED_GPU"]
CUFILE = ["GDS", "GPU_ASYNC", "GPU_BATCH"]
MIB = 1 << 20


def opened(path: Path, transfer_type: str) -> td.DirectFile:
    file = td.DirectFile(path, "w+", transfer_type=transfer_type)
    if transfer_type in CUFILE:
        try:
            file.write(torch.zeros(1, device="cuda"))
        except td.TransferUnavailableError as exc:
            file.close()
            pytest.skip(str(exc))
    return file


@pytest.mark.parametrize("transfer_type", HOST + CUFILE)
@pytest.mark.parametrize("offset", [0, 1, 4096, 4097])
def test_round_trip(offset: int, transfer_type: str, tmp_path: Path) -> None:
    with opened(tmp_path / "a", transfer_type) as file:
        for nbytes in (3, 5000, 9 * MIB + 17):
            tensor = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device="cuda")
            assert file.write(tensor, offset) == nbytes
            back = torch.zeros_like(tensor)
            assert file.read_into(back, offset) == nbytes
            assert torch.equal(back, tensor)
        assert file.submit_write(tensor, offset + 16 * MIB).result(30) == tensor.numel()
        with file.batch() as batch:
            backs = [torch.zeros_like(tensor) for _ in range(3)]
            for back in backs:
                batch.read_into(back, offset + 16 * MIB)
        assert all(torch.equal(back, tensor) for back in backs)


def test_stream_ordered(tmp_path: Path) -> None:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with opened(tmp_path / "a", "GPU_ASYNC") as file:
        tensor = torch.zeros(4 * MIB, dtype=torch.uint8, device="cuda")
        back = torch.zeros_like(tensor)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
            tensor.fill_(9)
            written = file.write_async(tensor, 4096)
            read = file.read_async(back, 4096)
            total = back.sum()
        stream.synchronize()
        assert (written.result(), read.result()) == (tensor.numel(), tensor.numel())
        assert int(total) == 9 * tensor.numel()
        beyond = file.read_async(back, 1 << 30, stream)
        stream.synchronize()
        with pytest.raises((EOFError, OSError)):
            beyond.result()


@pytest.mark.parametrize("transfer_type", CUFILE)
def test_registered_buffers(transfer_type: str, tmp_path: Path) -> None:
    with opened(tmp_path / "a", transfer_type) as file:
        pool = torch.randint(0, 255, (8, 2 * MIB), dtype=torch.uint8, device="cuda")
        back = torch.zeros_like(pool)
        with td.register_buffer(pool), td.register_buffer(back):
            with pytest.raises(ValueError, match="registered already"):
                td.register_buffer(pool)
            if transfer_type == "GPU_ASYNC" and not gds_status(tmp_path).direct:
                os.truncate(tmp_path / "a", 64 * MIB)
                for call in (file.write, file.read_into, file.write_async, file.read_async):
                    with pytest.raises(td.TransferUnavailableError, match="registered memory"):
                        call(pool[2])
                return
            file.write(pool)
            file.read_into(back)
            assert torch.equal(back, pool)
            back.zero_()
            for i in range(8):
                file.read_into(back[i], i * 2 * MIB)
            assert torch.equal(back, pool)
        with pytest.raises(ValueError, match="not registered"):
            td.deregister_buffer(pool)
