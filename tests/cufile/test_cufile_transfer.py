"""Handles and buffers."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import threading
from pathlib import Path

import pytest

from cufile_double import CuFileDouble
from torchdirect.cufile import buffer, driver, handle
from torchdirect.cufile.buffer import RegisteredBuffer
from torchdirect.cufile.errors import CuFileError
from torchdirect.cufile.handle import FileHandle


def memory(nbytes: int) -> tuple[ctypes.Array[ctypes.c_char], int]:
    block = ctypes.create_string_buffer(nbytes)
    return block, ctypes.addressof(block)


@pytest.fixture
def no_leaks(cufile_double: CuFileDouble):  # type: ignore[no-untyped-def]
    yield cufile_double
    assert handle.registered() == buffer.registered() == buffer.registered_bytes() == driver.use_count() == 0
    cufile_double.assert_no_leaks()


def test_read_and_write(no_leaks: CuFileDouble, data_file: Path) -> None:
    block, address = memory(8192)
    with data_file.open("r+b") as file, FileHandle(file.fileno()) as opened:
        assert (opened.fd, opened.path, opened.closed) == (file.fileno(), str(data_file), False)
        assert opened.read(address, 4096, file_offset=8192, ptr_offset=4096) == 4096
        assert block.raw[4096:] == data_file.read_bytes()[8192:12288]
        assert opened.write(address, 4096, file_offset=4096, ptr_offset=4096) == 4096
        assert opened.read(address, 8192, file_offset=65536 - 100) == 100
    content = data_file.read_bytes()
    assert content[4096:8192] == content[8192:12288]
    assert opened.closed
    opened.close()
    with pytest.raises(ValueError, match="is closed"):
        opened.read(address, 1)


def test_partial_transfers_are_returned(no_leaks: CuFileDouble, data_file: Path) -> None:
    _block, address = memory(8192)
    no_leaks.set("cap.read", 1000)
    no_leaks.set("cap.write", 2000)
    with data_file.open("r+b") as file, FileHandle(file.fileno()) as opened:
        assert opened.read(address, 8192) == 1000
        assert opened.write(address, 8192) == 2000


def test_both_kinds_of_errors(no_leaks: CuFileDouble, data_file: Path) -> None:
    _block, address = memory(4096)
    with data_file.open("r+b") as file, FileHandle(file.fileno()) as opened:
        no_leaks.fail("cuFileWrite", errno.ENOSPC, nth=2)
        opened.write(address, 4096)
        with pytest.raises(CuFileError, match=r"cuFileWrite.*ENOSPC.*4096 bytes at offset 512.*free space") as full:
            opened.write(address, 4096, file_offset=512)
        assert isinstance(full.value, OSError)
        assert (full.value.errno, full.value.code) == (errno.ENOSPC, 0)
        opened.write(address, 4096)
        no_leaks.fail("cuFileRead", 5030)
        with pytest.raises(CuFileError, match="CU_FILE_INTERNAL_ERROR") as internal:
            opened.read(address, 4096)
        assert (internal.value.code, internal.value.path) == (5030, str(data_file))


def test_alignment_refusal(no_leaks: CuFileDouble, data_file: Path) -> None:
    _block, address = memory(12288)
    aligned = (address + 4095) // 4096 * 4096
    no_leaks.set("align", 4096)
    with data_file.open("rb") as file, FileHandle(file.fileno()) as opened:
        assert opened.read(aligned, 4096, 4096) == 4096
        for arguments in ((aligned, 4095, 0), (aligned, 4096, 1), (aligned + 8, 4096, 0), (aligned, 4096, 0, 8)):
            with pytest.raises(CuFileError, match="CU_FILE_INVALID_VALUE"):
                opened.read(*arguments)


@pytest.mark.parametrize("arguments", [(-1, 0, 0), (1, -1, 0), (1, 0, -1), (1 << 62, 1 << 62, 0)])
def test_impossible_ranges(no_leaks: CuFileDouble, data_file: Path, arguments: tuple[int, int, int]) -> None:
    with data_file.open("rb") as file, FileHandle(file.fileno()) as opened, pytest.raises(ValueError):
        opened.read(4096, *arguments)


@pytest.mark.parametrize("code", [5027, 5030, 5033, 5008])
def test_registration_errors_name_file_system_and_device(
    no_leaks: CuFileDouble, data_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int
) -> None:
    monkeypatch.setattr(handle, "_UDEV_DATA", str(tmp_path / "udev"))
    no_leaks.fail("cuFileHandleRegister", code)
    number = os.stat(data_file).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    mounts = tmp_path / "mountinfo"
    monkeypatch.setattr(handle, "_MOUNTINFO", str(mounts))
    with data_file.open("rb") as file:
        mounts.write_text(f"36 35 {device} / /data rw,noatime master:1 - ext4 /dev/vda1 rw\n")
        with pytest.raises(CuFileError) as caught:
            FileHandle(file.fileno())
        text = str(caught.value)
        for part in (str(data_file), f"({code})", f"ext4 file system on /dev/vda1, device {device}"):
            assert part in text
        if code == 5033:
            assert "install the NVIDIA driver" in text
        else:
            assert f"udev has no record {tmp_path}/udev/b{device}" in text and "/run/udev:/run/udev:ro" in text
        (tmp_path / "udev").mkdir()
        (tmp_path / "udev" / f"b{device}").touch()
        with pytest.raises(CuFileError) as caught:
            FileHandle(file.fileno())
        assert f"udev has no record {tmp_path}" not in str(caught.value)
        mounts.write_text(f"36 35 {device} / / rw - overlay overlay rw\n")
        with pytest.raises(CuFileError, match="bind mount or volume, not on the container's overlay"):
            FileHandle(file.fileno())


def test_bad_descriptor_and_double_registration(no_leaks: CuFileDouble, data_file: Path) -> None:
    with pytest.raises(CuFileError, match="5022"):
        FileHandle(9999)
    with data_file.open("rb") as file, FileHandle(file.fileno()), pytest.raises(CuFileError, match="5028"):
        FileHandle(file.fileno())


def test_forgotten_objects_are_released(no_leaks: CuFileDouble, data_file: Path) -> None:
    _block, address = memory(4096)
    with data_file.open("rb") as file:
        opened, pinned = FileHandle(file.fileno()), RegisteredBuffer(address, 4096)
        assert handle.registered() == buffer.registered() == 1
        del opened, pinned
        gc.collect()


def test_transfers_run_in_parallel(no_leaks: CuFileDouble, data_file: Path) -> None:
    no_leaks.set("delay_us.cuFileRead", 30000)
    blocks = [memory(4096) for _ in range(6)]
    with data_file.open("rb") as file, FileHandle(file.fileno()) as opened:
        threads = [
            threading.Thread(target=opened.read, args=(address, 4096, i * 4096))
            for i, (_, address) in enumerate(blocks)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    content = data_file.read_bytes()
    assert all(block.raw == content[i * 4096 : (i + 1) * 4096] for i, (block, _) in enumerate(blocks))
    assert no_leaks.get("peak.inflight") > 1


def test_buffer(no_leaks: CuFileDouble) -> None:
    _block, address = memory(8192)
    with RegisteredBuffer(address, 8192) as pinned:
        assert (buffer.registered(), buffer.registered_bytes(), no_leaks.get("live.buffer_bytes")) == (1, 8192, 8192)
        assert (pinned.device_ptr, pinned.nbytes, pinned.closed) == (address, 8192, False)
        with pytest.raises(CuFileError, match="CU_FILE_MEMORY_ALREADY_REGISTERED"):
            RegisteredBuffer(address, 4096)
    assert pinned.closed
    pinned.close()
    with pytest.raises(ValueError, match="at least one byte"):
        RegisteredBuffer(address, 0)


def test_buffer_limits(no_leaks: CuFileDouble) -> None:
    _block, address = memory(8192)
    no_leaks.set("buf.max", 4096)
    with pytest.raises(CuFileError, match=r"CU_FILE_INVALID_MAPPING_SIZE.*8192 bytes.*smaller pieces"):
        RegisteredBuffer(address, 8192)
    with RegisteredBuffer(address, 4096):
        pass
    no_leaks.set("buf.deny", 1)
    no_leaks.set("buf.code", 5036)
    with pytest.raises(CuFileError, match="BAR1"):
        RegisteredBuffer(address, 4096)


def test_buffer_is_released_on_error_and_interrupt(no_leaks: CuFileDouble) -> None:
    _block, address = memory(4096)
    with pytest.raises(KeyboardInterrupt), RegisteredBuffer(address, 4096):
        raise KeyboardInterrupt


def test_failed_deregistration_is_raised_and_counts_as_closed(cufile_double: CuFileDouble) -> None:
    _block, address = memory(4096)
    pinned = RegisteredBuffer(address, 4096)
    cufile_double.fail("cuFileBufDeregister", 5010)
    with pytest.raises(CuFileError, match="CU_FILE_NVFS_DRIVER_ERROR"):
        pinned.close()
    assert pinned.closed and buffer.registered() == driver.use_count() == 0
