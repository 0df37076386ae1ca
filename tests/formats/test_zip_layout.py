"""The layout of new files: PyTorch's own, byte for byte, and right beyond 32 bits."""

from __future__ import annotations

import os
import struct
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.serialization import config

import torchdirect as td
from checkpoints import OTHER, PLAIN
from torchdirect.formats import torch_zip, zip_layout
from torchdirect.formats.zip_directory import payload_offset, read_directory

ALIGNMENTS = [64, 512, 4096]
NAMES = ["linear", "trained", "views", "zero size", "nested", "empty dict", "large and small", "float8", "own reduce"]


def without_serialization_id(path: Path) -> bytes:
    """The file with the one record blanked that is random in PyTorch's writer, and with its CRC-32 fields."""
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        (info,) = [i for i in archive.infolist() if i.filename.endswith("serialization_id")]
    at = data.index(b"serialization_id", info.header_offset)
    payload = info.header_offset + 30 + sum(struct.unpack_from("<HH", data, info.header_offset + 26))
    assert at < payload
    data[payload : payload + 40] = b"0" * 40
    crc = struct.pack("<I", info.CRC)
    while crc in data:
        where = data.index(crc)
        data[where : where + 4] = bytes(4)
    return bytes(data)


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("name", NAMES)
def test_byte_for_byte_as_torch_save(
    name: str, alignment: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchdirect.checkpoint.STORAGE_ALIGNMENT", alignment)
    obj = {**PLAIN, **OTHER}[name]()
    (tmp_path / "td").mkdir()
    with config.patch({"save.storage_alignment": alignment}):  # type: ignore[attr-defined]
        torch.save(obj, tmp_path / "same.pt")
        td.save(obj, tmp_path / "td" / "same.pt")
    assert without_serialization_id(tmp_path / "td" / "same.pt") == without_serialization_id(tmp_path / "same.pt")


sizes = st.lists(st.one_of(st.integers(0, 300), st.integers(0, 1 << 35)), max_size=8)


@given(sizes, st.sampled_from([1, 64, 512, 4096, 32768]), st.text("abcé", max_size=9), st.booleans())
@settings(deadline=None)
def test_pieces_tile_the_file(nbytes: list[int], alignment: int, archive: str, crc: bool) -> None:
    layout = torch_zip.layout_file(archive, b"x" * 77, nbytes, alignment=alignment, byteorder="little", crc=crc)
    pieces = sorted(
        [(e.file_offset, e.nbytes) for e in layout.extents] + [(g.file_offset, g.nbytes) for g in layout.gaps]
    )
    position = 0
    for offset, length in pieces:
        assert offset == position
        position += length
    assert position == layout.file_size
    assert [e.storage for e in layout.extents] == [i for i, n in enumerate(nbytes) if n]
    for extent in layout.extents:
        assert extent.file_offset % alignment == 0
        assert extent.nbytes == nbytes[extent.storage]
    crcs = [(i * 2654435761) & 0xFFFFFFFF for i in range(len(nbytes))]
    rendered = {g.file_offset: g.render(crcs) for g in layout.gaps}
    assert all(len(rendered[g.file_offset]) == g.nbytes for g in layout.gaps)

    def read_at(offset: int, length: int) -> bytes:
        for start, data in rendered.items():
            if start <= offset < start + len(data):
                return data[offset - start : offset - start + length]
        raise AssertionError(f"the directory is read from a storage, at {offset}")

    entries = read_directory(lambda o, n: tail(rendered, layout.file_size, o, n), layout.file_size, "f")
    for extent in layout.extents:
        entry = entries[f"{archive}/data/{extent.storage}"]
        assert (entry.nbytes, entry.size, entry.crc) == (extent.nbytes, extent.nbytes, crcs[extent.storage])
        assert payload_offset(read_at, entry, layout.file_size, "f") == extent.file_offset


def tail(rendered: dict[int, bytes], file_size: int, offset: int, nbytes: int) -> bytes:
    """Read from a file of which only the gaps exist; zeros elsewhere, short at the end."""
    out = bytearray(max(0, min(nbytes, file_size - offset)))
    for start, data in rendered.items():
        first, last = max(start, offset), min(start + len(data), offset + len(out))
        if first < last:
            out[first - offset : last - offset] = data[first - start : last - start]
    return bytes(out)


@pytest.mark.parametrize("nbytes", [[0xFFFFFFFE], [0xFFFFFFFF], [1 << 32], [5 << 30, 7], [3 << 30, 3 << 30, 5]])
def test_a_sparse_file_beyond_32_bits_is_a_good_zip(nbytes: list[int], tmp_path: Path) -> None:
    layout = torch_zip.layout_file("big", b"p", nbytes, alignment=4096, byteorder="little", crc=True)
    path = tmp_path / "big.zip"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        os.ftruncate(fd, layout.file_size)  # holes take no room
        for gap in layout.gaps:
            os.pwrite(fd, gap.render([zlib.crc32(bytes(n)) if n < 100 else 0 for n in nbytes]), gap.file_offset)
    finally:
        os.close(fd)
    with zipfile.ZipFile(path) as archive:
        for i, size in enumerate(nbytes):
            info = archive.getinfo(f"big/data/{i}")
            assert info.file_size == info.compress_size == size
        assert archive.read("big/data.pkl") == b"p"
        with archive.open(f"big/data/{len(nbytes) - 1}") as file:
            assert file.read(5) == bytes(5)
    reader: Any = torch._C.PyTorchFileReader(str(path))
    assert reader.get_record_offset("data/0") == layout.extents[0].file_offset


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.binary(min_size=1, max_size=40))
def test_records(header_offset: int, nbytes: int, name: bytes) -> None:
    record = zip_layout.place_record(name, header_offset, nbytes, 64)
    header = zip_layout.local_header(record)
    assert header_offset + len(header) == record.payload_offset
    assert record.payload_offset % 64 == 0
    assert record.payload_end + len(zip_layout.data_descriptor(record, 1)) == record.end
    assert len(zip_layout.central_directory([record], [1], 0)) == (
        zip_layout.central_size(record) + zip_layout.END_RECORDS_SIZE
    )


def test_byte_order_record(tmp_path: Path) -> None:
    td.save({}, tmp_path / "a.pt")
    td.save({}, tmp_path / "b.pt", _disable_byteorder_record=True)
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        assert archive.read("a/byteorder").decode() == sys.byteorder
    with zipfile.ZipFile(tmp_path / "b.pt") as archive:
        assert "b/byteorder" not in archive.namelist()
