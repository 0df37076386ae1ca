"""The cuFile engine over a double of libcufile, with host memory in the part of GPU memory."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cufile_double import CuFileDouble
from torchdirect import memory
from torchdirect.cufile import Batch, driver, stream
from torchdirect.engines import cufile as engine_module
from torchdirect.engines import direct_proof, inline, make_engine
from torchdirect.engines.base import EngineOptions, OpenFile, TransferState
from torchdirect.engines.cufile import CuFileEngine, registration_pays
from torchdirect.engines.streams import QueuedWork
from torchdirect.errors import CorruptCheckpointError, LoadError, SaveError, TransferUnavailableError
from torchdirect.formats import torch_zip
from torchdirect.plan import Extent, read_windows, write_windows
from torchdirect.transfer import TransferType

TYPES = [TransferType.GDS, TransferType.GPU_ASYNC, TransferType.GPU_BATCH]
CHUNK = 16384
OPTIONS = EngineOptions(TransferType.GDS, 3, CHUNK, 1 << 20)


class FakeStream:
    numbers = itertools.count(1)

    def __init__(self, double: CuFileDouble) -> None:
        self.handle = next(self.numbers)
        self._double = double

    def mark(self) -> Callable[[], None]:
        return self.synchronize

    def synchronize(self) -> None:
        self._double.run_stream(self.handle)


class FakeDevices:
    """Storages whose index is in `held` are on a GPU."""

    def __init__(self, double: CuFileDouble, held: list[torch.Tensor]) -> None:
        self._double = double
        self._held = {t.data_ptr() for t in held}

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() in self._held

    def current(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def stream(self, device: torch.device, queued: QueuedWork) -> FakeStream:
        return FakeStream(self._double)


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "STRAIGHT_FROM", 8192)
    monkeypatch.setattr(engine_module, "_SILENCE_SECONDS", 0.3)


@pytest.fixture(params=TYPES, ids=[t.name for t in TYPES])
def options(request: pytest.FixtureRequest) -> EngineOptions:
    return dataclasses.replace(OPTIONS, transfer_type=request.param)


@pytest.fixture
def double(cufile_double: CuFileDouble) -> Iterator[CuFileDouble]:
    threads, fds = threading.active_count(), len(os.listdir("/proc/self/fd"))
    cufile_double.set("async.mode", 1)
    yield cufile_double
    driver.let_close()
    cufile_double.assert_no_leaks()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == fds
    assert memory.staging_pool._reserved == 0


@contextlib.contextmanager
def opened(path: Path, flags: int, kind: TransferType | None = None) -> Iterator[OpenFile]:
    fd = os.open(path, flags)
    direct = os.open(path, flags)  # not O_DIRECT: the double passes addresses on, which libcufile bounces as needed
    gpu_file = None
    try:
        gpu_file = engine_module.open_file(kind, direct, str(path)) if kind is not None else None
        yield OpenFile(str(path), fd, direct, path.stat().st_size, 512, 512, gpu_file)
    finally:
        if gpu_file is not None:
            gpu_file.close()
        os.close(fd)
        os.close(direct)


def storages(sizes: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(sizes))
    return [torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator) for n in sizes]


def save(
    path: Path, tensors: list[torch.Tensor], options: EngineOptions, double: CuFileDouble, held: list[torch.Tensor]
) -> tuple[bytes, TransferState]:
    """Write a file; return what it should hold, and the state."""
    layout = torch_zip.layout_file(
        "a", b"pickle", [t.numel() for t in tensors], alignment=4096, byteorder="little", crc=True
    )
    image = path.with_suffix(".expected")
    image.write_bytes(bytes(layout.file_size))
    with opened(image, os.O_RDWR) as file:
        inline.write(file, layout.extents, layout.gaps, tensors, True, TransferState())
    path.write_bytes(bytes(layout.file_size))
    state = TransferState()
    with opened(path, os.O_RDWR, options.transfer_type) as file:
        windows = write_windows(
            layout.extents, layout.gaps, chunk_bytes=options.chunk_bytes, file_size=layout.file_size
        )
        CuFileEngine(options, devices=FakeDevices(double, held)).write(file, windows, layout.gaps, tensors, True, state)
        os.truncate(path, layout.file_size)
    return image.read_bytes(), state


def load(
    path: Path, extents: list[Extent], options: EngineOptions, double: CuFileDouble, on_host: tuple[int, ...] = ()
) -> tuple[list[torch.Tensor], TransferState]:
    tensors = [torch.zeros(e.nbytes, dtype=torch.uint8) for e in extents]
    held = [t for i, t in enumerate(tensors) if i not in on_host]
    state = TransferState()
    with opened(path, os.O_RDONLY, options.transfer_type) as file:
        windows = read_windows(extents, chunk_bytes=options.chunk_bytes, file_size=file.size)
        CuFileEngine(options, devices=FakeDevices(double, held)).read(
            file, windows, tensors, lambda i: f"tensor 't{i}'", state
        )
    return tensors, state


SIZES = [100_000, 5, 0, 70_001, 20_480, 9000]


def test_round_trip(options: EngineOptions, double: CuFileDouble, tmp_path: Path) -> None:
    tensors = storages(SIZES)
    held = [t for i, t in enumerate(tensors) if i != 4 and t.numel()]
    expected, state = save(tmp_path / "a", tensors, options, double, held)
    assert (tmp_path / "a").read_bytes() == expected
    assert state.done == state.total == len(expected)
    assert double.get("bytes.written") > 150_000
    assert state.direct is False
    assert "moved by way of the host" in state.fallbacks[0]


@pytest.mark.parametrize("shift", [0, 1, 64, 4095])
def test_reads_at_any_alignment(shift: int, options: EngineOptions, double: CuFileDouble, tmp_path: Path) -> None:
    data = bytes(storages([300_000])[0].tolist())
    (tmp_path / "a").write_bytes(data)
    double.set("align", 0)
    extents = [Extent(shift, 100_000, 0), Extent(100_500 + shift, 9000, 1), Extent(150_000 - shift, 140_001, 2)]
    tensors, state = load(tmp_path / "a", extents, options, double, on_host=(1,))
    for tensor, e in zip(tensors, extents, strict=True):
        assert bytes(tensor.tolist()) == data[e.file_offset : e.end]
    assert state.done == state.total
    assert double.get("bytes.read") > 200_000


@given(
    sizes=st.lists(st.integers(0, 60_000), min_size=1, max_size=8),
    kind=st.sampled_from(TYPES),
    chunk=st.integers(1, 8).map(lambda n: n * 4096),
    mask=st.integers(0, 255),
    shift=st.integers(0, 5000),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_plan(
    sizes: list[int], kind: TransferType, chunk: int, mask: int, shift: int, double: CuFileDouble, tmp_path: Path
) -> None:
    driver.let_close()
    double.reset()
    double.set("async.mode", 1)
    options = dataclasses.replace(OPTIONS, transfer_type=kind, chunk_bytes=chunk)
    tensors = storages(sizes)
    held = [t for i, t in enumerate(tensors) if mask >> i & 1 and t.numel()]
    expected, _ = save(tmp_path / "a", tensors, options, double, held)
    assert (tmp_path / "a").read_bytes() == expected
    extents: list[Extent] = []
    position = shift
    for i, size in enumerate(sizes):
        if position + size <= len(expected):
            extents.append(Extent(position, size, len(extents)))
        position += size + 100 * i
    on_host = tuple(i for i in range(len(extents)) if not mask >> i & 1)
    loaded, _ = load(tmp_path / "a", extents, options, double, on_host)
    for tensor, e in zip(loaded, extents, strict=True):
        assert bytes(tensor.tolist()) == expected[e.file_offset : e.end]


def short(double: CuFileDouble) -> None:
    double.set("cap.read", 4096)
    double.set("cap.write", 4096)
    double.set("async.short.nth", 2)
    double.set("async.short.by", 4096)
    double.set("batch.short.nth", 2)
    double.set("batch.short.by", 8192)


def ragged(double: CuFileDouble) -> None:
    """Stops within a block, so that it must be taken up again on a boundary."""
    double.set("cap.read", 5000)
    double.set("cap.write", 5000)
    double.set("async.short.nth", 1)
    double.set("async.short.by", 1000)
    double.set("batch.short.nth", 1)
    double.set("batch.short.by", 1)


def out_of_order(double: CuFileDouble) -> None:
    double.set("batch.reverse", 1)
    double.set("batch.step", 2)
    double.set("batch.polls", 3)
    double.set("props.max_batch_io_size", 3)


def late(double: CuFileDouble) -> None:
    double.set("async.mode", 2)
    double.set("async.delay_ms", 3)
    double.set("delay_us.cuFileRead", 500)


def interrupted(double: CuFileDouble) -> None:
    for function in ("cuFileRead", "cuFileWrite"):
        double.fail(function, errno.EINTR, nth=2)
    double.set("async.nth", 2)
    double.set("async.value", -errno.EAGAIN)
    double.set("batch.event.nth", 2)
    double.set("batch.event.ret", -errno.EAGAIN)


class LateStream(FakeStream):
    def synchronize(self) -> None:
        while self._double.get("live.async"):
            pass


@pytest.mark.parametrize("fault", [short, ragged, out_of_order, late, interrupted], ids=lambda f: f.__name__)
def test_what_is_taken_up_again(
    fault: Callable[[CuFileDouble], None],
    options: EngineOptions,
    double: CuFileDouble,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if fault is late:
        monkeypatch.setattr(FakeDevices, "stream", lambda self, *_: LateStream(self._double))
    tensors = storages(SIZES)
    fault(double)
    expected, state = save(tmp_path / "a", tensors, options, double, [t for t in tensors if t.numel()])
    assert (tmp_path / "a").read_bytes() == expected
    driver.let_close()
    double.reset()
    double.set("async.mode", 1)
    fault(double)
    loaded, read_state = load(tmp_path / "a", [Extent(0, len(expected), 0)], options, double)
    assert bytes(loaded[0].tolist()) == expected
    if fault in (short, ragged, interrupted):
        assert state.retries > 0
        assert read_state.retries > 0


def fail_the_third(double: CuFileDouble) -> None:
    for function in ("cuFileRead", "cuFileWrite"):
        double.fail(function, errno.EIO, nth=3)
    double.set("async.nth", 3)
    double.set("async.value", -errno.EIO)
    double.set("batch.event.nth", 3)
    double.set("batch.event.ret", -errno.EIO)


def refuse_submission(double: CuFileDouble) -> None:
    for function in ("cuFileRead", "cuFileReadAsync", "cuFileWrite", "cuFileWriteAsync", "cuFileBatchIOSubmit"):
        double.fail(function, 5030, nth=1)


@pytest.mark.parametrize("how", ["one", "submission"])
def test_a_failure_names_file_offset_and_tensor(
    how: str, options: EngineOptions, double: CuFileDouble, tmp_path: Path
) -> None:
    fail = fail_the_third if how == "one" else refuse_submission
    tensors = storages(SIZES)
    fail(double)
    with pytest.raises(SaveError, match=r"a: writing \d+ bytes at offset \d+ \(storage \d.*cuFile"):
        save(tmp_path / "a", tensors, options, double, [t for t in tensors if t.numel()])
    driver.let_close()
    double.reset()
    double.set("async.mode", 1)
    fail(double)
    (tmp_path / "b").write_bytes(bytes(400_000))
    with pytest.raises(LoadError, match=r"b: reading \d+ bytes at offset \d+ \(tensor 't0'\).*load again") as caught:
        load(tmp_path / "b", [Extent(4096, 300_000, 0)], options, double)
    assert caught.value.name == "tensor 't0'"
    assert caught.value.offset is not None
    assert caught.value.errno == errno.EIO


def test_a_full_disk_is_told_as_such(double: CuFileDouble, tmp_path: Path) -> None:
    double.fail("cuFileWrite", errno.ENOSPC, nth=2)
    tensors = storages([200_000])
    with pytest.raises(SaveError, match="No space left") as caught:
        save(tmp_path / "a", tensors, OPTIONS, double, tensors)
    assert caught.value.errno == errno.ENOSPC


def test_a_file_that_is_shorter_than_planned(options: EngineOptions, double: CuFileDouble, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(150_000))
    with pytest.raises(CorruptCheckpointError, match=r"a: the file ends at offset \d+, within tensor 't0'"):
        load(tmp_path / "a", [Extent(0, 300_000, 0)], options, double)


def fail_in_workers(monkeypatch: pytest.MonkeyPatch, ready: Callable[[], bool]) -> list[str]:
    """Let the host engine's writes fail once `ready` holds; the calling thread's, which make the image, succeed."""
    real, failed = os.pwritev, []

    def pwritev(*arguments: Any) -> int:
        if threading.current_thread() is threading.main_thread():
            return real(*arguments)
        deadline = time.monotonic() + 10
        while not ready():
            assert time.monotonic() < deadline, "cuFile was never called"
        failed.append(threading.current_thread().name)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwritev", pwritev)
    return failed


def cufile_calls(double: CuFileDouble) -> int:
    return sum(double.get(f"calls.{f}") for f in ("cuFileWrite", "cuFileWriteAsync", "cuFileBatchIOSubmit"))


def test_a_host_fault_stops_the_rest(options: EngineOptions, double: CuFileDouble, tmp_path: Path,
                                     monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    failed = fail_in_workers(monkeypatch, lambda: cufile_calls(double) > 0)
    tensors = storages(SIZES)
    with pytest.raises(OSError, match="Input/output"):
        save(tmp_path / "a", tensors, options, double, [t for t in tensors if t.numel()])
    assert failed


def test_a_host_fault_stops_what_is_tried_again(options: EngineOptions, double: CuFileDouble, tmp_path: Path,
                                                monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Not only when the time for trying again, half a minute, is over."""
    double.fail("cuFileWrite", errno.EAGAIN)
    double.set("async.nth", -1)
    double.set("async.value", -errno.EAGAIN)
    double.set("batch.event.nth", -1)
    double.set("batch.event.ret", -errno.EAGAIN)
    failed = fail_in_workers(monkeypatch, lambda: cufile_calls(double) > 3)
    tensors = storages([400_000])
    began = time.monotonic()
    with pytest.raises(OSError, match="Input/output"):
        save(tmp_path / "a", tensors, options, double, tensors)
    assert failed
    assert time.monotonic() - began < 10


class BrokenStream(FakeStream):
    """Answers like a stream of a GPU with an error; the first of its kind does, the others work."""

    made: list[BrokenStream]

    def __init__(self, double: CuFileDouble) -> None:
        super().__init__(double)
        self.broken = not self.made
        self.made.append(self)

    def mark(self) -> Callable[[], None]:
        return self.synchronize

    def synchronize(self) -> None:
        if self.broken:
            self._double.run_stream(self.handle)
            raise RuntimeError("CUDA error")
        super().synchronize()


class UnmarkedStream(FakeStream):
    def mark(self) -> Callable[[], None]:
        raise RuntimeError("CUDA error")


def test_a_broken_gpu_leaves_nothing_in_flight_on_another(
    double: CuFileDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    BrokenStream.made = []
    monkeypatch.setattr(FakeDevices, "stream", lambda self, *_: BrokenStream(self._double))
    monkeypatch.setattr(engine_module._Run, "device", lambda self, request: torch.device("cuda", request.storage))
    (tmp_path / "a").write_bytes(bytes(100_000))
    options = dataclasses.replace(OPTIONS, transfer_type=TransferType.GPU_ASYNC, num_threads=1)
    with pytest.raises(RuntimeError, match="CUDA error"):
        load(tmp_path / "a", [Extent(0, 8192, 0), Extent(40_960, 8192, 1)], options, double)
    assert len(BrokenStream.made) == 2
    assert double.get("live.async") == stream.pending() == 0


def test_a_stream_that_takes_no_mark(double: CuFileDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeDevices, "stream", lambda self, *_: UnmarkedStream(self._double))
    (tmp_path / "a").write_bytes(bytes(100_000))
    with pytest.raises(RuntimeError, match="CUDA error"):
        options = dataclasses.replace(OPTIONS, transfer_type=TransferType.GPU_ASYNC)
        load(tmp_path / "a", [Extent(0, 81_920, 0)], options, double)
    assert double.get("live.async") == stream.pending() == 0


@pytest.mark.parametrize("answers", [True, False], ids=["late", "never"])
def test_a_batch_that_fails_is_drained(
    answers: bool, double: CuFileDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow the disk is; and the memory is kept where cuFile never answers."""
    monkeypatch.setattr(engine_module, "_SILENCE_SECONDS", 0.0)
    monkeypatch.setattr(engine_module, "_HUNG_SECONDS", 30.0 if answers else 0.05)
    monkeypatch.setattr(engine_module, "_never_answered", [])
    polls, left = itertools.count(), []
    poll, close = Batch.poll, Batch.close

    def slow(self: Batch, *arguments: Any) -> Any:
        return poll(self, *arguments) if answers and next(polls) > 20 else []

    def closing(self: Batch) -> None:
        left.append(self.outstanding)
        assert double.get("calls.cuFileBatchIOCancel") == 0  # it makes libcufile forget the entries
        close(self)

    monkeypatch.setattr(Batch, "poll", slow)
    monkeypatch.setattr(Batch, "close", closing)
    failed = fail_in_workers(monkeypatch, lambda: cufile_calls(double) > 0)
    tensors = storages([400_000])
    with pytest.raises(OSError, match="Input/output"):
        options = dataclasses.replace(OPTIONS, transfer_type=TransferType.GPU_BATCH)
        save(tmp_path / "a", tensors, options, double, tensors)
    assert failed
    if answers:
        assert left == [0]
        assert engine_module._never_answered == []
    else:
        assert left[0] > 0
        assert engine_module._never_answered == [tensors]


def test_answers_behind_one_that_fails_count(
    double: CuFileDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One poll tells of many entries; the first of them ends the load."""
    monkeypatch.setattr(engine_module, "_never_answered", [])

    def fail(*_: Any) -> None:
        raise RuntimeError("stopped")

    monkeypatch.setattr(engine_module._Reading, "moved", fail)
    (tmp_path / "a").write_bytes(bytes(400_000))
    options = dataclasses.replace(OPTIONS, transfer_type=TransferType.GPU_BATCH)
    with pytest.raises(RuntimeError, match="stopped"):
        load(tmp_path / "a", [Extent(0, 327_680, 0)], options, double)
    assert engine_module._never_answered == []


def test_only_the_refused_submission_is_left(
    double: CuFileDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_never_answered", [])
    monkeypatch.setattr(engine_module, "_SILENCE_SECONDS", 0.05)
    double.fail("cuFileBatchIOSubmit", 5030, nth=2)
    double.set("props.max_batch_io_size", 4)
    double.set("batch.step", 1)
    (tmp_path / "a").write_bytes(bytes(400_000))
    options = dataclasses.replace(OPTIONS, transfer_type=TransferType.GPU_BATCH)
    with pytest.raises(LoadError, match="5030"):
        load(tmp_path / "a", [Extent(0, 327_680, 0)], options, double)
    assert engine_module._never_answered == []


@pytest.mark.parametrize("kind", [TransferType.GPU_ASYNC, TransferType.GPU_BATCH], ids=lambda kind: kind.name)
def test_a_read_of_nothing_is_no_proof_of_a_short_file(
    kind: TransferType, double: CuFileDouble, tmp_path: Path
) -> None:
    double.set("async.nth", 2)
    double.set("async.value", 0)
    double.set("batch.event.nth", 2)
    double.set("batch.event.status", 0x10)
    (tmp_path / "a").write_bytes(bytes(100_000))
    with pytest.raises(LoadError, match="cuFile moved nothing and gave no error"):
        load(tmp_path / "a", [Extent(0, 81_920, 0)], dataclasses.replace(OPTIONS, transfer_type=kind), double)


def on_page(nbytes: int) -> torch.Tensor:
    memory = torch.empty(nbytes + 4096, dtype=torch.uint8)
    start = -memory.data_ptr() % 4096
    return memory[start : start + nbytes]


def test_requests_are_whole_blocks(options: EngineOptions, double: CuFileDouble, tmp_path: Path) -> None:
    """The double refuses everything else here: address, offset and length, also where a transfer is taken up again."""
    double.set("align", 4096)
    double.set("batch.short.nth", 2)
    double.set("batch.short.by", 4096)
    double.set("async.short.nth", 2)
    double.set("async.short.by", 4096)
    double.set("cap.write", 8192)
    tensors = [on_page(n).copy_(t) for n, t in zip(SIZES, storages(SIZES), strict=True)]
    expected, _ = save(tmp_path / "a", tensors, options, double, [t for t in tensors if t.numel()])
    assert (tmp_path / "a").read_bytes() == expected


def test_a_refused_alignment_is_told(options: EngineOptions, double: CuFileDouble, tmp_path: Path) -> None:
    double.set("align", 1 << 20)
    (tmp_path / "a").write_bytes(bytes(400_000))
    with pytest.raises(LoadError, match=r"offset \d+ \(tensor 't0'\)"):
        load(tmp_path / "a", [Extent(4096, 300_000, 0)], options, double)


def test_the_threads_of_the_host_engine_are_told(double: CuFileDouble, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(400_000))
    _, state = load(tmp_path / "a", [Extent(0, 300_000, 0)], OPTIONS, double, on_host=(0,))
    assert state.num_threads == 3
    assert state.direct is None


def test_an_interrupt_leaves_nothing_in_flight(
    options: EngineOptions, double: CuFileDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_HUNG_SECONDS", 0.2)  # the batch of this test never completes
    monkeypatch.setattr(engine_module, "_never_answered", [])
    (tmp_path / "a").write_bytes(bytes(3_000_000))
    double.set("batch.stuck", 1)
    double.set("delay_us.cuFileRead", 3000)
    double.set("delay_us.cuFileReadAsync", 3000)
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        load(tmp_path / "a", [Extent(0, 3_000_000, 0)], options, double)
    timer.join()


@pytest.mark.parametrize(("function", "code"), [("cuFileDriverOpen", 5001), ("cuFileHandleRegister", 5027)])
def test_unavailable(function: str, code: int, options: EngineOptions, double: CuFileDouble, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(100_000))
    double.fail(function, code)
    name = options.transfer_type.name
    with pytest.raises(TransferUnavailableError, match=rf"{name} is not available.*{code}") as caught:
        load(tmp_path / "a", [Extent(0, 100_000, 0)], options, double)
    assert caught.value.remedy


def test_an_old_library(cufile_double_old: CuFileDouble, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(100_000))
    for kind, works in ((TransferType.GDS, True), (TransferType.GPU_ASYNC, False)):
        options = dataclasses.replace(OPTIONS, transfer_type=kind)
        with contextlib.nullcontext() if works else pytest.raises(TransferUnavailableError, match="no cuFileReadAsync"):
            load(tmp_path / "a", [Extent(0, 100_000, 0)], options, cufile_double_old)
    driver.let_close()
    cufile_double_old.assert_no_leaks()


def test_registration(options: EngineOptions, double: CuFileDouble, tmp_path: Path,
                      monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    assert not registration_pays(options.transfer_type, False, 1 << 40)
    assert not registration_pays(options.transfer_type, True, 4096)
    registers = options.transfer_type is not TransferType.GPU_ASYNC
    assert registration_pays(options.transfer_type, True, 1 << 30) is registers
    monkeypatch.setattr(engine_module, "REGISTER_FROM", 8192)
    (tmp_path / "a").write_bytes(bytes(100_000))
    direct = dataclasses.replace(options, direct=True)
    extents = [Extent(0, 40_000, 0), Extent(45_056, 40_000, 1)]
    _, state = load(tmp_path / "a", extents, direct, double)
    assert double.get("calls.cuFileBufRegister") == (2 if registers else 0)
    assert state.direct is True
    double.fail("cuFileBufRegister", 5016, nth=4)
    _, state = load(tmp_path / "a", extents, direct, double)
    assert not registers or "registers no more GPU memory" in state.fallbacks[-1]
    double.fail("cuFileRead", 5)
    double.set("async.nth", -1)
    double.set("async.value", -5)
    double.set("batch.event.nth", -1)
    double.set("batch.event.ret", -5)
    with pytest.raises(LoadError):
        load(tmp_path / "a", extents, direct, double)


def test_requests_in_flight_and_their_size(double: CuFileDouble, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(1_000_000))
    double.set("delay_us.cuFileRead", 2000)
    double.set("props.max_direct_io_size", 8)
    load(tmp_path / "a", [Extent(0, 999_424, 0)], OPTIONS, double)
    assert double.get("peak.inflight") == 3
    assert double.get("calls.cuFileRead") == 999_424 // 8192
    double.set("props.max_direct_io_size", 0)
    driver.let_close()
    load(tmp_path / "a", [Extent(0, 999_424, 0)], OPTIONS, double)
    assert double.get("calls.cuFileRead") == 999_424 // 8192 + 999_424 // CHUNK


STATS = "GDS Version: 1.13\nIO stats: {}, peer IO stats: Enabled\nReads\t\t\t: n={} ok=1 err=0\nWrites\t\t: n=2 ok=2\n"


def test_what_nvidia_fs_counted(tmp_path: Path) -> None:
    stats = tmp_path / "stats"
    assert direct_proof.transfers_counted(str(stats)) is None
    stats.write_text(STATS.format("Disabled", 5))
    assert direct_proof.transfers_counted(str(stats)) is None
    stats.write_text(STATS.format("Enabled", 5))
    assert direct_proof.transfers_counted(str(stats)) == 7
    counter = direct_proof.TransferCounter(str(stats))
    assert counter.moved() is False
    stats.write_text(STATS.format("Enabled", 6))
    assert counter.moved() is True


def test_the_factory() -> None:
    for kind in TransferType:
        if kind is not TransferType.AUTO:
            engine = make_engine(dataclasses.replace(OPTIONS, transfer_type=kind))
            assert isinstance(engine, CuFileEngine) is kind.uses_cufile
