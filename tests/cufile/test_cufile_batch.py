from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from cufile_double import CuFileDouble
from torchdirect.cufile import batch, driver
from torchdirect.cufile.batch import Batch, BatchEntry, BatchEvent
from torchdirect.cufile.errors import CuFileError
from torchdirect.cufile.handle import FileHandle
from torchdirect.cufile.structs import BatchStatus, Opcode


@pytest.fixture
def no_leaks(cufile_double: CuFileDouble):  # type: ignore[no-untyped-def]
    yield cufile_double
    assert batch.live() == driver.use_count() == 0
    cufile_double.assert_no_leaks()


@pytest.fixture
def block() -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(65536)


def entries(handle: FileHandle, block: ctypes.Array[ctypes.c_char], count: int) -> list[BatchEntry]:
    address = ctypes.addressof(block)
    return [BatchEntry(handle, Opcode.READ, address, 4096, i * 4096, i * 4096, cookie=i) for i in range(count)]


def collect(running: Batch) -> list[BatchEvent]:
    events: list[BatchEvent] = []
    for _ in range(100):
        events += running.poll(running.outstanding, timeout=1.5)
        if not running.outstanding:
            return events
    raise AssertionError("the batch did not finish")


def test_read_and_write(no_leaks: CuFileDouble, data_file: Path, block: ctypes.Array[ctypes.c_char]) -> None:
    with data_file.open("r+b") as file, FileHandle(file.fileno()) as handle, Batch(16) as running:
        running.submit([])
        assert running.poll(1) == []
        running.submit(entries(handle, block, 16))
        assert running.outstanding == 16
        events = collect(running)
        assert sorted(event.cookie for event in events) == [*range(16)]
        assert all(event.status is BatchStatus.COMPLETE and event.bytes_done() == 4096 for event in events)
        assert block.raw == data_file.read_bytes()
        address = ctypes.addressof(block)
        running.submit([BatchEntry(handle, Opcode.WRITE, address, 100, 7, 4096, cookie=2**64 - 1)])
        (event,) = running.poll(1, timeout=None)
        assert (event.cookie, event.result) == (2**64 - 1, 100)
    assert data_file.read_bytes()[7:107] == block.raw[4096:4196]
    assert running.closed
    running.close()
    with pytest.raises(ValueError, match="closed"):
        running.poll()


def test_partial_and_reversed_completion(
    no_leaks: CuFileDouble, data_file: Path, block: ctypes.Array[ctypes.c_char]
) -> None:
    no_leaks.set("batch.reverse", 1)
    no_leaks.set("batch.step", 3)
    no_leaks.set("batch.polls", 2)
    with data_file.open("rb") as file, FileHandle(file.fileno()) as handle, Batch(8) as running:
        running.submit(entries(handle, block, 8))
        assert running.poll() == running.poll() == []
        first = running.poll(8)
        assert [event.cookie for event in first] == [7, 6, 5]
        with pytest.raises(ValueError, match="4 entries do not fit: 5 of 8"):
            running.submit(entries(handle, block, 4))
        running.submit(entries(handle, block, 3))
        assert len(collect(running)) == 8


@pytest.mark.parametrize(
    ("status", "ret", "name"),
    [
        (BatchStatus.FAILED, -5, "EIO"),
        (BatchStatus.FAILED, -5030, "CU_FILE_INTERNAL_ERROR"),
        (BatchStatus.COMPLETE, -5, "EIO"),
        (BatchStatus.FAILED, 0, "CUFILE_FAILED"),
        (BatchStatus.CANCELED, 0, "CUFILE_CANCELED"),
        (BatchStatus.TIMEOUT, 0, "CUFILE_TIMEOUT"),
        (BatchStatus.INVALID, 0, "CUFILE_INVALID"),
    ],
)
def test_failed_entry(
    no_leaks: CuFileDouble,
    data_file: Path,
    block: ctypes.Array[ctypes.c_char],
    status: BatchStatus,
    ret: int,
    name: str,
) -> None:
    no_leaks.set("batch.event.nth", 2)
    no_leaks.set("batch.event.status", status)
    no_leaks.set("batch.event.ret", ret)
    with data_file.open("rb") as file, FileHandle(file.fileno()) as handle, Batch(3) as running:
        running.submit(entries(handle, block, 3))
        events = {event.cookie: event for event in collect(running)}
    assert events[0].failure is events[2].failure is None
    failure = events[1].failure
    assert failure is not None and failure.name == name
    with pytest.raises(CuFileError, match=rf"'/data/x': {name}.*entry 1, result {ret}"):
        events[1].bytes_done("/data/x")


def test_short_entry(no_leaks: CuFileDouble, data_file: Path, block: ctypes.Array[ctypes.c_char]) -> None:
    no_leaks.set("batch.short.nth", 1)
    no_leaks.set("batch.short.by", 96)
    with data_file.open("rb") as file, FileHandle(file.fileno()) as handle, Batch(1) as running:
        running.submit(entries(handle, block, 1))
        assert collect(running)[0].bytes_done() == 4000


def test_limit(no_leaks: CuFileDouble) -> None:
    with pytest.raises(CuFileError, match="129 entries; the driver's limit is max_batch_entries"):
        Batch(129)
    with pytest.raises(ValueError, match="at least one entry"):
        Batch(0)


def test_errors_of_every_call(no_leaks: CuFileDouble, data_file: Path, block: ctypes.Array[ctypes.c_char]) -> None:
    with data_file.open("rb") as file, FileHandle(file.fileno()) as handle, Batch(2) as running:
        no_leaks.fail("cuFileBatchIOSubmit", 5035, nth=1)
        with pytest.raises(CuFileError, match=r"data\.bin.*CU_FILE_BATCH_SUBMIT_FAILED.*2 entries"):
            running.submit(entries(handle, block, 2))
        no_leaks.fail("cuFileBatchIOGetStatus", 5041)
        with pytest.raises(CuFileError, match="5041"):
            running.poll(1)
        with pytest.raises(ValueError, match="negative"):
            running.poll(-1)
        no_leaks.fail("cuFileBatchIOCancel", 5042)
        with pytest.raises(CuFileError, match="5042"):
            running.cancel()


def test_cancel_and_close_with_entries_in_flight(
    no_leaks: CuFileDouble, data_file: Path, block: ctypes.Array[ctypes.c_char]
) -> None:
    no_leaks.set("batch.stuck", 1)
    no_leaks.set("batch.cancel_tells", 1)
    with data_file.open("rb") as file, FileHandle(file.fileno()) as handle:
        with Batch(4) as running:
            running.submit(entries(handle, block, 4))
            assert running.poll(4) == []
            running.cancel()
            assert all(event.status is BatchStatus.CANCELED for event in collect(running))
        with Batch(4) as running:
            running.submit(entries(handle, block, 4))
        assert no_leaks.get("calls.cuFileBatchIOCancel") == 2
        with pytest.raises(KeyboardInterrupt), Batch(4) as running:
            running.submit(entries(handle, block, 4))
            raise KeyboardInterrupt
