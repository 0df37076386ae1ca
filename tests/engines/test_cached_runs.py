"""The tight loop of loads from the page cache, with a driver whose copies happen as late as they may."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchdirect import memory
from torchdirect.engines import host as host_module
from torchdirect.engines import streams as streams_module
from torchdirect.engines.base import EngineOptions, OpenFile, TransferState
from torchdirect.engines.checksums import PartChecksums
from torchdirect.engines.host import HostEngine
from torchdirect.errors import CorruptCheckpointError, LoadError
from torchdirect.plan import Extent, read_windows
from torchdirect.transfer import TransferType

GPU = torch.device("cuda", 0)
CHUNK = 4096


@dataclass
class LazyDriver:
    """Copies only when an event is waited for: a buffer that is filled too early delivers wrong bytes."""

    queued: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    recorded: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    live: set[int] = field(default_factory=set)
    made: int = 0
    fail_at: int = 1 << 60

    def exchange_capture_mode(self, mode: int = 2) -> int:
        return 0

    def bind(self, device: int) -> None:
        pass

    def to_device(self, device_address: int, host_address: int, nbytes: int, stream: int) -> None:
        self.fail_at -= 1
        if self.fail_at < 0:
            raise RuntimeError("CUDA error 700 while copying")
        self.queued.setdefault(stream, []).append((device_address, host_address, nbytes))

    def create_event(self) -> int:
        self.made += 1
        self.live.add(self.made)
        return self.made

    def destroy_event(self, event: int) -> None:
        self.live.remove(event)

    def record(self, event: int, stream: int) -> None:
        self.recorded[event] = self.queued.pop(stream, [])

    def wait(self, event: int) -> None:
        for target, source, nbytes in self.recorded.pop(event, []):
            memory.copy(target, source, nbytes)


class FakeStreams:
    """What `WorkerStreams` gives, without a GPU."""

    handles = 0

    def __init__(self, driver: LazyDriver) -> None:
        self.driver = driver
        FakeStreams.handles += 1
        self.cuda_stream = FakeStreams.handles

    def use(self, device: torch.device) -> FakeStreams:
        return self

    def end(self) -> None:
        assert self.driver.queued.get(self.cuda_stream, []) == [] or self.driver.fail_at < 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> LazyDriver:
    made = LazyDriver()
    monkeypatch.setattr(host_module, "cuda_driver", lambda: made)
    monkeypatch.setattr(streams_module, "cuda_driver", lambda: made)
    monkeypatch.setattr(host_module, "WorkerStreams", lambda ready: FakeStreams(made))

    class OnGpu(host_module._Storages):
        def __init__(self, tensors: Any) -> None:
            super().__init__(tensors)
            self.devices = [GPU] * len(tensors)

    monkeypatch.setattr(host_module, "_Storages", OnGpu)
    return made


def load(
    path: Path, extents: list[Extent], sizes: list[int], num_threads: int = 2, checksums: PartChecksums | None = None
) -> tuple[list[torch.Tensor], TransferState]:
    tensors, state = [torch.zeros(n, dtype=torch.uint8) for n in sizes], TransferState()
    fd, size = os.open(path, os.O_RDONLY), path.stat().st_size
    try:
        windows = read_windows(extents, chunk_bytes=CHUNK, file_size=size)
        options = EngineOptions(TransferType.CPU_CACHED_GPU, num_threads, CHUNK, 1 << 20)
        file = OpenFile(str(path), fd, None, size)
        HostEngine(options).read(file, windows, tensors, lambda i: f"tensor {i}", state, checksums=checksums)
    finally:
        os.close(fd)
    return tensors, state


@given(data=st.data(), num_threads=st.integers(1, 3))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_byte_arrives(data: st.DataObject, num_threads: int, driver: LazyDriver, tmp_path: Path) -> None:
    sizes = data.draw(st.lists(st.integers(CHUNK, 10 * CHUNK), min_size=1, max_size=4))
    gaps = data.draw(st.lists(st.integers(CHUNK, 3 * CHUNK), min_size=len(sizes), max_size=len(sizes)))
    extents, offset = [], 0
    for i, (nbytes, gap) in enumerate(zip(sizes, gaps, strict=True)):
        extents.append(Extent(offset + gap, nbytes, i))
        offset += gap + nbytes
    content = torch.randint(0, 255, (offset,), dtype=torch.uint8)
    (tmp_path / "a").write_bytes(bytes(content.tolist()))
    sums = PartChecksums(sizes)
    tensors, state = load(tmp_path / "a", extents, sizes, num_threads, sums)
    for extent, tensor in zip(extents, tensors, strict=True):
        assert torch.equal(tensor, content[extent.file_offset : extent.end])
    assert sums.missing == [0] * len(sizes)
    assert state.done == state.total > 0
    assert driver.live == set()


def once(real: Callable[..., int], act: Callable[[Callable[..., int], Any], int], nth: int) -> Callable[..., int]:
    calls = 0

    def call(fd: int, buffers: Any, offset: int) -> int:
        nonlocal calls
        calls += 1
        return act(real, (fd, buffers, offset)) if calls == nth else real(fd, buffers, offset)

    return call


def interrupted(real: Callable[..., int], arguments: Any) -> int:
    raise OSError(errno.EAGAIN, "try again")


def short(real: Callable[..., int], arguments: Any) -> int:
    fd, buffers, offset = arguments
    return real(fd, [buffers[0][:100]], offset)


@pytest.mark.parametrize("act", [interrupted, short])
@pytest.mark.parametrize("nth", [1, 2, 3, 7])
def test_a_read_that_falls_short_is_taken_up_again(
    act: Any, nth: int, driver: LazyDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = torch.randint(0, 255, (10 * CHUNK,), dtype=torch.uint8)
    (tmp_path / "a").write_bytes(bytes(content.tolist()))
    monkeypatch.setattr(os, "preadv", once(os.preadv, act, nth))
    sums = PartChecksums([9 * CHUNK])
    (tensor,), _ = load(tmp_path / "a", [Extent(64, 9 * CHUNK, 0)], [9 * CHUNK], 1, sums)
    assert torch.equal(tensor, content[64 : 64 + 9 * CHUNK])
    assert sums.missing == [0]


def test_a_read_that_fails_names_the_place(driver: LazyDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(bytes(10 * CHUNK))

    def fail(fd: int, buffers: Any, offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(LoadError, match=r"at offset \d+ \(tensor 0\): Input/output error"):
        load(tmp_path / "a", [Extent(0, 9 * CHUNK, 0)], [9 * CHUNK], 3)
    assert driver.live == set()


def test_a_file_that_ends_early(driver: LazyDriver, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(3 * CHUNK))
    with pytest.raises(CorruptCheckpointError, match="the file ends at offset 12288, within tensor 0"):
        load(tmp_path / "a", [Extent(0, 9 * CHUNK, 0)], [9 * CHUNK])
    assert driver.live == set()


@pytest.mark.parametrize("copies", [0, 1, 2, 5])
def test_a_copy_that_fails_ends_the_load(copies: int, driver: LazyDriver, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(10 * CHUNK))
    driver.fail_at = copies
    with pytest.raises(RuntimeError, match="CUDA error 700"):
        load(tmp_path / "a", [Extent(0, 9 * CHUNK, 0)], [9 * CHUNK], 2)
    assert driver.live == set()
