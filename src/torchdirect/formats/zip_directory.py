"""Reading the directory of a zip container, with every number checked before it is used."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from torchdirect.errors import CorruptCheckpointError
from torchdirect.formats.zip_layout import (
    CENTRAL_SIGNATURE,
    END64_SIGNATURE,
    END_SIGNATURE,
    LOCAL_SIGNATURE,
    LOCATOR64_SIGNATURE,
    U16_MAX,
    U32_MAX,
)

ReadAt = Callable[[int, int], bytes]
"""``read_at(offset, nbytes)`` returns that part of the file, shorter only at its end."""

_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END = struct.Struct("<IHHHHIIH")
_END64 = struct.Struct("<IQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<IIQI")
_LOCAL = struct.Struct("<IHHHHHIIIHH")

STORED = 0
_ENCRYPTED = 0x0001 | 0x0040 | 0x2000


@dataclass(slots=True)
class Entry:
    """One record as the central directory describes it.

    Attributes
    ----------
    name
        Full name in the archive.
    header_offset
        First byte of the local header in the file.
    nbytes
        Payload length in the file, in bytes.
    size
        Length after decompression, in bytes; equal to `nbytes` for a stored record.
    crc
        CRC-32 of the content; 0 where the writer did not compute one.
    method
        Compression method; 0 is stored.
    """

    name: str
    header_offset: int
    nbytes: int
    size: int
    crc: int
    method: int


def read_directory(read_at: ReadAt, file_size: int, path: str) -> dict[str, Entry]:
    """Return every record of the zip file by name, in directory order.

    Raises
    ------
    CorruptCheckpointError
        If there is no valid directory, an entry points outside the file, is encrypted, or comes twice.
    """
    offset, size, count = _locate_directory(read_at, file_size, path)
    data = read_at(offset, size)
    if len(data) != size:
        raise _corrupt(path, offset, "the central directory is cut short")
    entries: dict[str, Entry] = {}
    at = 0
    for _ in range(count):
        if at + _CENTRAL.size > size:
            raise _corrupt(path, offset + at, f"the central directory ends before entry {len(entries) + 1} of {count}")
        fields = _CENTRAL.unpack_from(data, at)
        if fields[0] != CENTRAL_SIGNATURE:
            raise _corrupt(path, offset + at, "an entry of the central directory has a wrong signature")
        flags, method, crc, nbytes, full, name_size, extra_size, comment_size = (
            fields[3], fields[4], fields[7], fields[8], fields[9], fields[10], fields[11], fields[12],
        )  # fmt: skip
        header_offset = fields[16]
        name_at = at + _CENTRAL.size
        extra_at = name_at + name_size
        following = extra_at + extra_size + comment_size
        if following > size:
            raise _corrupt(path, offset + at, "an entry of the central directory runs past its end")
        try:
            name = data[name_at:extra_at].decode()
        except UnicodeDecodeError:
            raise _corrupt(path, offset + name_at, "a record name is not UTF-8") from None
        if U32_MAX in (nbytes, full, header_offset):
            nbytes, full, header_offset = _zip64_fields(
                data[extra_at : extra_at + extra_size], nbytes, full, header_offset, path, name
            )
        if flags & _ENCRYPTED:
            raise _corrupt(path, offset + at, f"record {name!r} is encrypted")
        if header_offset + _LOCAL.size + nbytes > offset:
            raise _corrupt(
                path,
                offset + at,
                f"record {name!r} claims {nbytes} bytes behind offset {header_offset}, past the data ({offset})",
            )
        if name in entries:
            raise _corrupt(path, offset + at, f"record {name!r} comes twice")
        entries[name] = Entry(name, header_offset, nbytes, full, crc, method)
        at = following
    return entries


def payload_offset(read_at: ReadAt, entry: Entry, file_size: int, path: str) -> int:
    """Return where the payload of `entry` begins, read from its local header.

    Raises
    ------
    CorruptCheckpointError
        If the header is not one, names another record, or leaves no room for the payload.
    """
    name = entry.name.encode()
    name_end = _LOCAL.size + len(name)
    header = read_at(entry.header_offset, name_end)
    if len(header) < name_end:
        raise _corrupt(path, entry.header_offset, f"the header of record {entry.name!r} is cut short")
    fields = _LOCAL.unpack_from(header)
    if fields[0] != LOCAL_SIGNATURE:
        raise _corrupt(path, entry.header_offset, f"the header of record {entry.name!r} has a wrong signature")
    if fields[9] != len(name) or not header.endswith(name):
        raise _corrupt(path, entry.header_offset, f"the header of record {entry.name!r} names another record")
    start: int = entry.header_offset + name_end + fields[10]
    if start + entry.nbytes > file_size:
        raise _corrupt(
            path, start, f"record {entry.name!r} claims {entry.nbytes} bytes; the file ends after {file_size - start}"
        )
    return start


def _corrupt(path: str, offset: int, what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{path}: {what} (at offset {offset}). The file is damaged or is not a checkpoint; take an intact copy of it"
    )


def _locate_directory(read_at: ReadAt, file_size: int, path: str) -> tuple[int, int, int]:
    """Return offset, length and entry count of the central directory."""
    # PyTorch's files have no comment behind the end record, and so end with it.
    tail_size = min(file_size, _END.size)
    tail_offset = file_size - tail_size
    tail = read_at(tail_offset, tail_size)
    if len(tail) < _END.size or not (tail.startswith(struct.pack("<I", END_SIGNATURE)) and tail.endswith(b"\0\0")):
        tail_size = min(file_size, _END.size + U16_MAX)
        tail_offset = file_size - tail_size
        tail = read_at(tail_offset, tail_size)
    found = tail.rfind(struct.pack("<I", END_SIGNATURE))
    while found >= 0:
        if found + _END.size <= len(tail):
            end = _END.unpack_from(tail, found)
            if found + _END.size + end[7] == len(tail):
                break
        found = tail.rfind(struct.pack("<I", END_SIGNATURE), 0, found)
    else:
        raise CorruptCheckpointError(
            f"{path}: this zip file has no central directory at its end (size {file_size} bytes): it was cut short, "
            "for example by a full disk or an unfinished copy. Take an intact copy of it"
        )
    end_offset = tail_offset + found
    disk, directory_disk, disk_count, count, size, offset = end[1:7]
    locator_offset = end_offset - _LOCATOR64.size
    directory_end = end_offset
    if locator_offset >= 0:
        locator = read_at(locator_offset, _LOCATOR64.size)
        if len(locator) == _LOCATOR64.size:
            signature, _, end64_offset, _ = _LOCATOR64.unpack(locator)
            if signature == LOCATOR64_SIGNATURE:
                if end64_offset + _END64.size > locator_offset:
                    raise _corrupt(path, locator_offset, "the zip64 locator points outside the file")
                end64 = _END64.unpack(read_at(end64_offset, _END64.size))
                if end64[0] != END64_SIGNATURE:
                    raise _corrupt(path, end64_offset, "the zip64 end record has a wrong signature")
                disk, directory_disk, disk_count, count, size, offset = end64[4:10]
                directory_end = end64_offset
    if disk or directory_disk or disk_count != count:
        raise _corrupt(path, end_offset, "the zip file claims to span several disks")
    if offset + size > directory_end:
        raise _corrupt(path, end_offset, f"the central directory claims {size} bytes at offset {offset}, past its end")
    if count * _CENTRAL.size > size:
        raise _corrupt(path, end_offset, f"the central directory claims {count} entries in {size} bytes")
    return offset, size, count


def _zip64_fields(
    extra: bytes, nbytes: int, full: int, header_offset: int, path: str, name: str
) -> tuple[int, int, int]:
    """Return the three numbers with those that overflow 32 bits taken from the zip64 extra field."""
    at = 0
    while at + 4 <= len(extra):
        identifier, length = struct.unpack_from("<HH", extra, at)
        if identifier == 1:
            values = extra[at + 4 : at + 4 + length]
            wanted = [full == U32_MAX, nbytes == U32_MAX, header_offset == U32_MAX]
            if len(values) != length or length < 8 * sum(wanted):
                break
            numbers = iter(struct.unpack_from(f"<{sum(wanted)}Q", values))
            full = next(numbers) if wanted[0] else full
            nbytes = next(numbers) if wanted[1] else nbytes
            header_offset = next(numbers) if wanted[2] else header_offset
            return nbytes, full, header_offset
        at += 4 + length
    raise CorruptCheckpointError(
        f"{path}: record {name!r} needs 64-bit sizes and has no valid zip64 field. "
        "The file is damaged; take an intact copy"
    )
