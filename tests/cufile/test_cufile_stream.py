from __future__ import annotations

import ctypes
import gc
import time
from pathlib import Path

import pytest

from cufile_double import CuFileDouble
from torchdirect.cufile import driver, stream
from torchdirect.cufile.errors import CuFileError
from torchdirect.cufile.handle import FileHandle
from torchdirect.cufile.stream import RegisteredStream, read_async, write_async
from torchdirect.cufile.structs import StreamFlags

STREAM = 0x1234


@pytest.fixture
def no_leaks(cufile_double: CuFileDouble):  # type: ignore[no-untyped-def]
    yield cufile_double
    assert stream.registered() == stream.pending() == driver.use_count() == 0
    cufile_double.assert_no_leaks()


@pytest.fixture
def block() -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(16384)


def test_registration(no_leaks: CuFileDouble) -> None:
    with RegisteredStream(STREAM, StreamFlags.FIXED_FILE_SIZE | StreamFlags.PAGE_ALIGNED_INPUTS) as registered:
        assert (registered.raw, registered.closed, stream.registered()) == (STREAM, False, 1)
        assert no_leaks.get("live.streams") == 1
    assert registered.closed
    no_leaks.fail("cuFileStreamRegister", 5038)
    with pytest.raises(CuFileError, match=r"CU_FILE_ASYNC_NOT_SUPPORTED.*0x1234"):
        RegisteredStream(STREAM)


def test_read_and_write(no_leaks: CuFileDouble, data_file: Path, block: ctypes.Array[ctypes.c_char]) -> None:
    address = ctypes.addressof(block)
    with data_file.open("r+b") as file, FileHandle(file.fileno()) as handle:
        read = read_async(handle, address, 4096, 8192, 4096, stream=STREAM)
        assert read.ready and read.result() == 4096 and read.result() == 4096
        assert block.raw[4096:8192] == data_file.read_bytes()[8192:12288]
        assert write_async(handle, address, 4096, 0, 4096, stream=0).result() == 4096
    assert data_file.read_bytes()[:4096] == block.raw[4096:8192]


def test_argument_memory_outlives_the_request(
    no_leaks: CuFileDouble, data_file: Path, block: ctypes.Array[ctypes.c_char]
) -> None:
    no_leaks.set("async.mode", 1)
    address = ctypes.addressof(block)
    with data_file.open("rb") as file, FileHandle(file.fileno()) as handle:
        kept = read_async(handle, address, 4096, 0, 0, stream=STREAM)
        read_async(handle, address, 4096, 4096, 4096, stream=STREAM)
        dropped = next(arguments for arguments, _ in stream._pending.values() if arguments.file_offset == 4096)
        gc.collect()
        assert stream.pending() == 2 and not kept.ready
        with pytest.raises(RuntimeError, match="synchronise the stream"):
            kept.result()
        assert no_leaks.run_stream(STREAM + 1) == 0
        assert no_leaks.run_stream(STREAM) == 2
        assert kept.result() == 4096 and dropped.bytes_done == 4096
    assert block.raw[:8192] == data_file.read_bytes()[:8192]
    assert stream.pending() == 1
    stream._pending.clear()


def test_completion_by_a_thread(no_leaks: CuFileDouble, data_file: Path, block: ctypes.Array[ctypes.c_char]) -> None:
    no_leaks.set("async.mode", 2)
    with data_file.open("rb") as file, FileHandle(file.fileno()) as handle:
        request = read_async(handle, ctypes.addressof(block), 4096, stream=STREAM)
        deadline = time.monotonic() + 10
        while no_leaks.get("live.async") and time.monotonic() < deadline:
            time.sleep(0.005)
        assert request.result() == 4096


@pytest.mark.parametrize(("value", "name"), [(-5, "EIO"), (-5030, "CU_FILE_INTERNAL_ERROR"), (-28, "ENOSPC")])
def test_failed_completion(
    no_leaks: CuFileDouble, data_file: Path, block: ctypes.Array[ctypes.c_char], value: int, name: str
) -> None:
    no_leaks.set("async.nth", 2)
    no_leaks.set("async.value", value)
    address = ctypes.addressof(block)
    with data_file.open("rb") as file, FileHandle(file.fileno()) as handle:
        good = read_async(handle, address, 4096, stream=STREAM)
        bad = read_async(handle, address, 4096, 4096, stream=STREAM)
        assert good.result() == 4096
        with pytest.raises(
            CuFileError, match=rf"cuFileReadAsync.*{name}.*stored {value} for 4096 bytes at offset 4096"
        ):
            bad.result()


def test_short_completion(no_leaks: CuFileDouble, data_file: Path, block: ctypes.Array[ctypes.c_char]) -> None:
    no_leaks.set("async.short.nth", -1)
    no_leaks.set("async.short.by", 4096)
    with data_file.open("rb") as file, FileHandle(file.fileno()) as handle:
        assert read_async(handle, ctypes.addressof(block), 16384, stream=STREAM).result() == 12288


def test_refused_submission_keeps_nothing(
    no_leaks: CuFileDouble, data_file: Path, block: ctypes.Array[ctypes.c_char]
) -> None:
    address = ctypes.addressof(block)
    no_leaks.fail("cuFileReadAsync", 5011, cuda=400)
    with data_file.open("rb") as file, FileHandle(file.fileno()) as handle:
        with pytest.raises(CuFileError, match="CUDA_ERROR_INVALID_HANDLE") as caught:
            read_async(handle, address, 4096, stream=STREAM)
        assert caught.value.cuda_error == 400
        with pytest.raises(ctypes.ArgumentError):
            read_async(handle, 1.5, 4096, stream=STREAM)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="negative"):
            read_async(handle, address, -1, stream=STREAM)


def test_discard(no_leaks: CuFileDouble, data_file: Path, block: ctypes.Array[ctypes.c_char]) -> None:
    no_leaks.set("async.mode", 1)
    with data_file.open("rb") as file, FileHandle(file.fileno()) as handle:
        request = read_async(handle, ctypes.addressof(block), 4096, stream=STREAM)
        no_leaks.run_stream()
        request.discard()
