"""Tensors at offsets of a file."""

from __future__ import annotations

import errno
import io
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torchdirect as td
from torchdirect import memory

TYPES = ["AUTO", "CPU_ONLY", "CPU_CACHED_GPU"]


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    before = (len(os.listdir("/proc/self/fd")), threading.active_count())
    yield
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
    assert memory.staging_pool._reserved == 0


def pattern(nbytes: int) -> torch.Tensor:
    return (torch.arange(nbytes) * 7919 % 251).to(torch.uint8)


@given(
    places=st.lists(st.tuples(st.integers(0, 30_000), st.integers(0, 60_000)), min_size=1, max_size=4),
    kind=st.sampled_from(TYPES),
    together=st.booleans(),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_write_changes_its_bytes_and_no_others(
    places: list[tuple[int, int]], kind: str, together: bool, tmp_path: Path
) -> None:
    path = tmp_path / "a"
    expected = bytearray(b"\xee" * 100_000)
    path.write_bytes(expected)
    tensors, position = [], 0
    for gap, nbytes in places:
        tensors.append((position + gap, pattern(nbytes)))
        position += gap + nbytes
        end = position
        expected.extend(bytes(max(0, end - len(expected))) if nbytes else b"")
        expected[end - nbytes : end] = bytes(tensors[-1][1].tolist())
    with td.DirectFile(path, "r+", transfer_type=kind, chunk_bytes=8192) as file:
        if together:
            with file.batch() as batch:
                for offset, tensor in tensors:
                    batch.write(tensor, offset)
            assert batch.nbytes == sum(nbytes for _, nbytes in places)
        else:
            for offset, tensor in tensors:
                assert file.write(tensor, offset) == tensor.numel()
        assert file.size() == len(expected)
        for offset, tensor in tensors:
            back = torch.zeros_like(tensor)
            assert file.read_into(back, offset) == tensor.numel()
            assert torch.equal(back, tensor)
    assert path.read_bytes() == expected


@pytest.mark.parametrize("kind", TYPES)
def test_views_dtypes_and_storages(kind: str, tmp_path: Path) -> None:
    base = torch.arange(40_000.0).reshape(200, 200)
    with td.DirectFile(tmp_path / "a", "w+", transfer_type=kind) as file:
        file.write(base[3:100], offset=12)
        back = torch.zeros(300, 200)
        file.read_into(back[5:102], offset=12)
        assert torch.equal(back[5:102], base[3:100])
        assert not back[:5].any()
        assert not back[102:].any()
        file.write(base.untyped_storage(), 1 << 20)
        half = torch.zeros(80_000, dtype=torch.bfloat16)
        file.read_into(half, 1 << 20)
        assert torch.equal(half.view(torch.float32), base.flatten())
        parameter = torch.nn.Parameter(torch.zeros(200))
        file.read_into(parameter, (1 << 20) + 800)
        assert torch.equal(parameter.detach(), base[1])


def test_futures(tmp_path: Path) -> None:
    tensors = [pattern(50_000 + n) for n in range(8)]
    with td.DirectFile(tmp_path / "a", "w+") as file:
        writes = [file.submit_write(t, n * 65_536) for n, t in enumerate(tensors)]
        assert [w.result(10) for w in writes] == [t.numel() for t in tensors]
        backs = [torch.zeros_like(t) for t in tensors]
        for read in [file.submit_read(b, n * 65_536) for n, b in enumerate(backs)]:
            read.result(timeout=10)
        assert all(map(torch.equal, tensors, backs))
        failing = file.submit_read(torch.zeros(10), 1 << 30)
        with pytest.raises(EOFError, match="past the end"):
            failing.result(10)
        last = file.submit_write(tensors[0], 1 << 20)
    assert last.done(), "closing waits"


def test_many_threads_share_a_file(tmp_path: Path) -> None:
    with td.DirectFile(tmp_path / "a", "w+", transfer_type="CPU_ONLY") as file:
        errors = []

        def work(n: int) -> None:
            tensor = torch.full((5000,), n, dtype=torch.uint8)
            for i in range(5):
                at = (n * 5 + i) * 5000
                file.write(tensor, at)
                back = torch.zeros_like(tensor)
                file.read_into(back, at)
                if not torch.equal(back, tensor):
                    errors.append(at)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []


def test_modes(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with pytest.raises(FileNotFoundError):
        td.DirectFile(path)
    with pytest.raises(ValueError, match="unknown mode 'rb'"):
        td.DirectFile(path, "rb")  # type: ignore[arg-type]
    with td.DirectFile(path, "x") as file:
        file.write(pattern(10_000))
        with pytest.raises(io.UnsupportedOperation, match=r"writing only.*'x\+'"):
            file.read_into(torch.zeros(3))
        with pytest.raises(io.UnsupportedOperation):
            file.batch().read_into(torch.zeros(3))
    with pytest.raises(FileExistsError):
        td.DirectFile(path, "x")
    with td.DirectFile(path) as file, pytest.raises(io.UnsupportedOperation, match=r"reading only.*'r\+'"):
        file.write(torch.zeros(3))
    with td.DirectFile(path, "w"):
        pass
    assert path.stat().st_size == 0
    with pytest.raises(IsADirectoryError):
        td.DirectFile(tmp_path)
    with pytest.raises(td.SettingsError, match="chunk_bytes"):
        td.DirectFile(path, chunk_bytes=17)


def test_a_closed_file(tmp_path: Path) -> None:
    file = td.DirectFile(tmp_path / "a", "w+")
    assert "mode='w+'" in repr(file)
    file.write(torch.zeros(3))
    file.sync()
    file.close()
    file.close()
    assert file.closed
    assert "closed" in repr(file)
    for call in (lambda: file.read_into(torch.zeros(1)), lambda: file.write(torch.zeros(1)), file.sync, file.size,
                 lambda: file.submit_read(torch.zeros(1)), lambda: file.read_async(torch.zeros(1))):  # fmt: skip
        with pytest.raises(ValueError, match="closed file"):
            call()


@pytest.mark.parametrize(
    ("call", "kind", "match"),
    [
        (lambda f: f.read_into(torch.zeros(4, 4).t()), ValueError, "not contiguous"),
        (lambda f: f.write(torch.eye(3).to_sparse()), ValueError, "not contiguous"),
        (lambda f: f.write(torch.zeros(3, device="meta")), ValueError, "meta"),
        (lambda f: f.write([1, 2]), TypeError, "list"),
        (lambda f: f.write(torch.zeros(3), -1), ValueError, "offset=-1"),
        (lambda f: f.read_into(torch.zeros(3), 1.5), ValueError, r"offset=1\.5"),
        (lambda f: f.read_into(torch.zeros(3), 7), EOFError, r"12 bytes at offset 7 runs past.*\(16 bytes\)"),
        (lambda f: f.read_async(torch.zeros(3)), td.TransferUnavailableError, "host memory.*submit_read"),
    ],
)
def test_misuse(call: Callable[[Any], object], kind: type[Exception], match: str, tmp_path: Path) -> None:
    with td.DirectFile(tmp_path / "a", "w+") as file:
        file.write(torch.ones(4))
        with pytest.raises(kind, match=match):
            call(file)
        back = torch.zeros(4)
        file.read_into(back)
        assert torch.equal(back, torch.ones(4))


@pytest.mark.parametrize("name", ["GDS", "GPU_BATCH", "CPU_ASYNC_GPU"])
def test_types_that_do_not_fit(name: str, tmp_path: Path) -> None:
    match = f"{name}.*no tensor is on a GPU"
    with (
        td.DirectFile(tmp_path / "a", "w+", transfer_type=name) as file,
        pytest.raises(td.TransferUnavailableError, match=match),
    ):
        file.write(torch.zeros(3))


def test_a_stream_needs_the_type_that_has_streams(tmp_path: Path) -> None:
    with (
        td.DirectFile(tmp_path / "a", "w+", transfer_type="CPU_ONLY") as file,
        pytest.raises(td.TransferUnavailableError, match="opened for CPU_ONLY"),
    ):
        file.write_async(torch.zeros(3))


def test_a_batch_that_overlaps_or_fails_moves_nothing(tmp_path: Path) -> None:
    with td.DirectFile(tmp_path / "a", "w+") as file:
        overlap = "overlap: 40 bytes at offset 0, and 40 bytes at offset 39"
        with pytest.raises(ValueError, match=overlap), file.batch() as batch:
            batch.write(torch.ones(10), 39)
            batch.write(torch.ones(10), 0)
        with pytest.raises(RuntimeError, match="mine"), file.batch() as batch:
            batch.write(torch.ones(10), 0)
            raise RuntimeError("mine")
        assert file.size() == 0
        with file.batch():
            pass


def test_faults_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with td.DirectFile(tmp_path / "a", "w+") as file:
        file.write(pattern(100_000))
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", fail)
            patch.setattr(os, "preadv", fail)
            with pytest.raises(td.SaveError, match=r"a: writing 5000 bytes at offset 77.*Input/output"):
                file.write(pattern(5000), 77)
            with pytest.raises(td.LoadError, match=r"a: reading.*Input/output"):
                file.read_into(pattern(5000), 77)
        assert file.write(pattern(5000), 77) == 5000


def test_buffers_that_cannot_be_registered() -> None:
    with pytest.raises(ValueError, match="GPU memory, not 12 bytes on cpu"):
        td.register_buffer(torch.zeros(3))
    with pytest.raises(ValueError, match="is not registered"):
        td.deregister_buffer(torch.zeros(3))
