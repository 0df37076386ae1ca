"""The cuFile transfer types with the real libcufile, direct or in its compatibility mode."""

from __future__ import annotations

import os
import shutil
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torchdirect as td
from checkpoints import PLAIN, same
from torchdirect import cufile
from torchdirect.cufile import batch, buffer, handle, stream
from torchdirect.gds_status import gds_status

pytestmark = pytest.mark.gpu
TYPES = ["GDS", "GPU_ASYNC", "GPU_BATCH"]
MIB = 1 << 20


@pytest.fixture(autouse=True)
def works_and_leaves_nothing(tmp_path: Path) -> Iterator[None]:
    path = tmp_path / "trial"
    path.write_bytes(bytes(4096))
    fd = os.open(path, os.O_RDWR)
    try:
        with cufile.FileHandle(fd):
            pass
    except (cufile.CuFileError, cufile.CuFileUnavailableError) as exc:
        pytest.skip(f"cuFile does not work here: {exc}")
    finally:
        os.close(fd)
        path.unlink()
    threads = threading.active_count()
    yield
    live = (handle.registered(), buffer.registered(), stream.registered(), stream.pending(), batch.live())
    assert live == (0, 0, 0, 0, 0)
    assert threading.active_count() == threads


def report() -> td.TransferReport:
    last = td.last_transfer()
    assert last is not None
    return last


@pytest.mark.parametrize("transfer_type", TYPES)
@pytest.mark.parametrize("nbytes", [1, 4095, 4097, MIB, 3 * MIB + 1, 40 * MIB, 70 * MIB + 5])
def test_sizes(nbytes: int, transfer_type: str, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    tensor = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device="cuda")
    td.save([tensor, tensor.cpu()], path, transfer_type=transfer_type, durable=False)
    assert report().used is td.TransferType[transfer_type]
    if nbytes > MIB:
        assert report().direct is gds_status(path).direct
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    for loaded in (td.load(path, transfer_type=transfer_type), torch.load(path)):
        assert torch.equal(loaded[0], tensor)
        assert torch.equal(loaded[1], tensor.cpu())


@pytest.mark.parametrize("transfer_type", TYPES)
def test_four_gigabytes(transfer_type: str, tmp_path: Path) -> None:
    size = (4 << 30) + 4099
    if shutil.disk_usage(tmp_path).free < 2 * size:
        pytest.skip("needs 9 GB of free space")
    tensor = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
    td.save(tensor, tmp_path / "a.pt", transfer_type=transfer_type, durable=False)
    loaded = td.load(tmp_path / "a.pt", transfer_type=transfer_type)
    assert torch.equal(loaded, tensor)
    del loaded
    assert torch.equal(torch.load(tmp_path / "a.pt", mmap=True, map_location="cuda"), tensor)
    os.unlink(tmp_path / "a.pt")


@pytest.mark.parametrize("transfer_type", TYPES)
def test_unaligned_files_of_torch_save(transfer_type: str, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    state = {f"t{n}": torch.randn(n, device="cuda") for n in (3, 2 * MIB, 1001, MIB + 77, 5 * MIB + 1)}
    torch.save(state, path)
    assert same(td.load(path, transfer_type=transfer_type), state)
    assert same(td.load(path, transfer_type=transfer_type, chunk_bytes=MIB), state)
    for name in ("trained", "nested", "not contiguous"):
        torch.save(PLAIN[name](), path)
        td.load(path, map_location="cuda", transfer_type=transfer_type)


@pytest.mark.parametrize("transfer_type", TYPES)
def test_stream_order(transfer_type: str, tmp_path: Path) -> None:
    path, numel = tmp_path / "a.pt", 8 * MIB
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    tensor = torch.zeros(numel, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
        tensor.fill_(7)
        td.save(tensor, path, transfer_type=transfer_type, durable=False)
    assert bool((torch.load(path, map_location="cpu") == 7).all())
    with torch.cuda.stream(side):
        old = torch.full((numel,), 5.0, device="cuda")
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
        copy = old.clone()
        del old  # its memory may be handed to the load while the copy is still queued
        total = td.load(path, transfer_type=transfer_type).sum()
    side.synchronize()
    assert float(total) == 7 * numel
    assert bool((copy == 5).all())


@pytest.mark.parametrize("transfer_type", TYPES)
def test_compatibility_mode_can_be_forbidden(transfer_type: str, tmp_path: Path) -> None:
    path, tensor = tmp_path / "a.pt", torch.ones(2 * MIB, device="cuda")
    td.save(tensor, path)
    if gds_status(path).direct:
        pytest.skip("the path is direct here")
    with td.settings(gds_compat="forbid"):
        for call in (lambda: td.save(tensor * 2, path, transfer_type=transfer_type),
                     lambda: td.load(path, transfer_type=transfer_type)):  # fmt: skip
            with pytest.raises(td.TransferUnavailableError, match="compatibility mode") as caught:
                call()
            assert caught.value.remedy
        with pytest.warns(td.TransferFallbackWarning, match="compatibility mode"):
            loaded = td.load(path, transfer_type=transfer_type, fallback="warn")
    assert torch.equal(loaded, tensor)
    assert os.listdir(tmp_path) == ["a.pt"]


def test_automatic_choice_takes_gds_only_where_it_is_real(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    td.save(torch.ones(2 * MIB, device="cuda"), path)
    used = report().used
    assert used is not None
    assert used.uses_cufile is gds_status(path).direct


@pytest.mark.parametrize("transfer_type", TYPES)
def test_a_file_cut_short_while_it_is_read(transfer_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.pt"
    td.save({"weight": torch.ones(32 * MIB, device="cuda")}, path)
    from torchdirect.engines import cufile as engine

    real = engine.CuFileEngine._begin

    def cut(self: Any, *arguments: Any) -> Any:
        os.truncate(path, 50 * MIB)
        return real(self, *arguments)

    monkeypatch.setattr(engine.CuFileEngine, "_begin", cut)
    with pytest.raises((td.CorruptCheckpointError, td.LoadError), match=r"a\.pt.*offset \d+.*'weight'"):
        td.load(path, transfer_type=transfer_type)


def test_a_batch_that_fails_is_drained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuFile answers for every entry that it took; 40 seconds of silence would be an entry it forgot."""
    from torchdirect.engines import cufile as engine

    path = tmp_path / "a.pt"
    td.save({"weight": torch.ones(64 * MIB, device="cuda")}, path, durable=False)

    def fail(*_: Any) -> None:
        raise RuntimeError("stopped with entries in flight")

    monkeypatch.setattr(engine._Reading, "moved", fail)
    with pytest.raises(RuntimeError, match="in flight"):
        td.load(path, transfer_type="GPU_BATCH", chunk_bytes=MIB)
    assert engine._never_answered == []
