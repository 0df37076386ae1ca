"""Damaged and hostile containers: one clear error, never anything else."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchdirect as td
from torchdirect import CorruptCheckpointError
from torchdirect.formats import torch_zip
from torchdirect.formats.pickle_index import UnsupportedPickleError
from torchdirect.formats.zip_directory import payload_offset, read_directory


def checkpoint() -> bytes:
    buffer = io.BytesIO()
    torch.save({"w": torch.arange(100.0), "b": torch.ones(3)}, buffer)
    return buffer.getvalue()


GOOD = checkpoint()
DIRECTORY = GOOD.index(b"PK\x01\x02")
END64 = GOOD.index(b"PK\x06\x06")
COUNT = struct.unpack_from("<Q", GOOD, END64 + 24)[0]
LOCATOR = GOOD.index(b"PK\x06\x07")
END = GOOD.index(b"PK\x05\x06")


def parse(data: bytes) -> None:
    """Read all that the index reads."""
    torch_zip.read_index(lambda offset, nbytes: data[offset : offset + nbytes], len(data), "the-file")


def patched(at: int, form: str, *values: int) -> bytes:
    data = bytearray(GOOD)
    struct.pack_into(form, data, at, *values)
    return bytes(data)


def twice() -> bytes:
    data = bytearray(GOOD)
    first, second = (DIRECTORY, GOOD.index(b"PK\x01\x02", DIRECTORY + 4))
    names = [data[at + 46 : at + 46 + struct.unpack_from("<H", data, at + 28)[0]] for at in (first, second)]
    assert len(names[0]) < len(names[1])
    # The second name becomes the first one by being cut; what is left of it becomes its extra field.
    struct.pack_into("<HH", data, second + 28, len(names[0]), len(names[1]) - len(names[0]))
    data[second + 46 : second + 46 + len(names[0])] = names[0]
    return bytes(data)


DAMAGE: dict[str, tuple[Callable[[], bytes], str]] = {
    "cut in the payload": (lambda: GOOD[: DIRECTORY // 2], "cut short"),
    "cut in the directory": (lambda: GOOD[: DIRECTORY + 30], "cut short"),
    "cut in the end record": (lambda: GOOD[:-3], "cut short"),
    "bytes behind the end": (lambda: GOOD + b"more", "cut short"),
    "directory signature": (lambda: patched(DIRECTORY, "<I", 0x11111111), "wrong signature"),
    "zip64 end signature": (lambda: patched(END64, "<I", 0x11111111), "zip64 end record has a wrong signature"),
    "zip64 locator points outside": (lambda: patched(LOCATOR + 8, "<Q", 1 << 60), "points outside"),
    "several disks": (lambda: patched(END64 + 16, "<I", 3), "several disks"),
    "directory offset outside": (lambda: patched(END64 + 48, "<Q", 1 << 62), "past its end"),
    "directory size overflows": (lambda: patched(END64 + 40, "<Q", (1 << 64) - 1), "past its end"),
    "too many entries": (lambda: patched(END64 + 24, "<QQ", 1 << 50, 1 << 50), "entries"),
    "one entry more than there is": (lambda: patched(END64 + 24, "<QQ", COUNT + 1, COUNT + 1), "before entry"),
    "encrypted": (lambda: patched(DIRECTORY + 8, "<H", 0x0801), "encrypted"),
    "name longer than the directory": (lambda: patched(DIRECTORY + 28, "<H", 0xFFFF), "past its end"),
    "size past the data": (lambda: patched(DIRECTORY + 20, "<II", 1 << 30, 1 << 30), "claims"),
    "offset past the data": (lambda: patched(DIRECTORY + 42, "<I", 0x7FFFFFFF), "claims"),
    "zip64 without its field": (lambda: patched(DIRECTORY + 20, "<II", 0xFFFFFFFF, 0xFFFFFFFF), "zip64 field"),
    "name is no text": (lambda: patched(DIRECTORY + 46, "<B", 0xFF), "UTF-8"),
    "header of another record": (lambda: patched(DIRECTORY + 42, "<I", 3), "wrong signature|claims"),
    "local name": (lambda: patched(GOOD.index(b"data.pkl"), "<B", 0x58), "names another record"),
    "local extra runs out of the file": (lambda: patched(28, "<H", 0xFFFF), "claims|cut short"),
    "names that come twice": (twice, "comes twice|names another"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(name: str) -> None:
    make, message = DAMAGE[name]
    with pytest.raises(CorruptCheckpointError, match=f"the-file: .*({message})") as caught:
        parse(make())
    assert "intact copy" in str(caught.value)


def test_the_good_file_is_good() -> None:
    parse(GOOD)
    entries = read_directory(lambda offset, nbytes: GOOD[offset : offset + nbytes], len(GOOD), "f")
    with zipfile.ZipFile(io.BytesIO(GOOD)) as archive:
        assert list(entries) == archive.namelist()
        for info in archive.infolist():
            entry = entries[info.filename]
            assert (entry.header_offset, entry.size, entry.crc) == (info.header_offset, info.file_size, info.CRC)
            start = payload_offset(lambda offset, nbytes: GOOD[offset : offset + nbytes], entry, len(GOOD), "f")
            assert GOOD[start : start + entry.nbytes] == archive.read(info)


@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=6), st.data())
@settings(max_examples=300, deadline=None)
def test_any_damage_gives_the_one_error_or_none(changes: list[tuple[int, int]], data: st.DataObject) -> None:
    damaged = bytearray(GOOD)
    for at, value in changes:
        # Most of the file is payload and padding; half of the changes go where they matter.
        damaged[at if at % 2 else DIRECTORY + at % (len(GOOD) - DIRECTORY)] = value
    stop = data.draw(st.one_of(st.just(len(damaged)), st.integers(0, len(damaged))))
    try:
        parse(bytes(damaged[:stop]))
    except (CorruptCheckpointError, UnsupportedPickleError, torch_zip.NotCarriedError):
        pass


def test_sizes_that_disagree(tmp_path: Path) -> None:
    """The pickle asks for more than its record holds."""
    path = tmp_path / "lie.pt"
    with zipfile.ZipFile(io.BytesIO(GOOD)) as old, zipfile.ZipFile(path, "w") as new:
        for info in old.infolist():
            data = old.read(info)
            new.writestr(info.filename, data[:40] if info.filename.endswith("data/0") else data)
    with pytest.raises(CorruptCheckpointError, match=r"lie\.pt: record 'data/0' holds 40 bytes.*pickle says 400"):
        td.load(path, transfer_type="CPU_ONLY")
    with zipfile.ZipFile(io.BytesIO(GOOD)) as old, zipfile.ZipFile(path, "w") as new:
        for info in old.infolist():
            if not info.filename.endswith("data/1"):
                new.writestr(info.filename, old.read(info))
    with pytest.raises(CorruptCheckpointError, match=r"storage '1'.*no record 'data/1'"):
        td.load(path, transfer_type="CPU_ONLY")
