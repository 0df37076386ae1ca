"""Byte layout of the zip container exactly as PyTorch's writer lays it out. Pure arithmetic, no I/O.

The rules are those of ``caffe2/serialize/inline_container.cc`` (padding) and of miniz (headers), which
``torch.load`` relies on when it computes storage offsets instead of reading them:

- every record is stored, not compressed, with its size 0 and CRC 0 in the local header and the true values in a data
  descriptor behind the payload (flag bit 3); an empty record has no descriptor;
- a record whose header begins at or beyond 2**32 - 1, or whose size reaches it, carries a zip64 extra field;
- an extra field with the id ``FB`` pads the local header so that the payload begins on the alignment;
- the directory always ends in both the zip64 and the plain end record.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

U16_MAX = 0xFFFF
U32_MAX = 0xFFFFFFFF

_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END64 = struct.Struct("<IQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<IIQI")
_END = struct.Struct("<IHHHHIIH")

LOCAL_SIGNATURE = 0x04034B50
CENTRAL_SIGNATURE = 0x02014B50
DESCRIPTOR_SIGNATURE = 0x08074B50
END64_SIGNATURE = 0x06064B50
LOCATOR64_SIGNATURE = 0x07064B50
END_SIGNATURE = 0x06054B50

_FLAG_UTF8 = 0x0800
_FLAG_DESCRIPTOR = 0x0008


class Record(NamedTuple):
    """Where one record of the container lies.

    Attributes
    ----------
    name
        Full name in the archive, such as ``b"ckpt/data/0"``.
    header_offset, payload_offset, end
        First byte of the local header, first byte of the payload, and one past the data descriptor.
    nbytes
        Payload length in bytes.
    zip64
        The zip64 extra field, or nothing where 32 bits are enough.
    """

    name: bytes
    header_offset: int
    payload_offset: int
    nbytes: int
    end: int
    zip64: bytes

    @property
    def payload_end(self) -> int:
        """One past the last payload byte."""
        return self.payload_offset + self.nbytes


def _zip64_values(header_offset: int, nbytes: int) -> bytes:
    """Return the zip64 extra field of a record, or nothing where 32 bits are enough."""
    values = struct.pack("<QQ", nbytes, nbytes) if nbytes >= U32_MAX else b""
    if header_offset >= U32_MAX:
        values += struct.pack("<Q", header_offset)
    return struct.pack("<HH", 1, len(values)) + values if values else b""


def place_record(name: bytes, header_offset: int, nbytes: int, alignment: int) -> Record:
    """Return where a record lies whose local header begins at `header_offset`.

    Parameters
    ----------
    alignment
        Bytes; the payload begins on a multiple of it. At most 32768: the padding must fit a zip extra field.
    """
    zip64 = _zip64_values(header_offset, nbytes)
    unpadded = header_offset + _LOCAL.size + len(name) + len(zip64) + 4
    payload_offset = -(-unpadded // alignment) * alignment
    end = payload_offset + nbytes + descriptor_size(header_offset, nbytes)
    return Record(name, header_offset, payload_offset, nbytes, end, zip64)


def descriptor_size(header_offset: int, nbytes: int) -> int:
    """Return the length in bytes of the data descriptor behind a payload."""
    if nbytes == 0:
        return 0
    return 24 if header_offset >= U32_MAX or nbytes >= U32_MAX else 16


def _flags(record: Record) -> int:
    return _FLAG_UTF8 | (_FLAG_DESCRIPTOR if record.nbytes else 0)


def local_header(record: Record) -> bytes:
    """Return the local header, from `header_offset` up to the payload."""
    name, header_offset, payload_offset, nbytes, _, zip64 = record
    extra_size = payload_offset - header_offset - _LOCAL.size - len(name)
    padding = extra_size - len(zip64) - 4
    flags = _FLAG_UTF8 | (_FLAG_DESCRIPTOR if nbytes else 0)
    fixed = _LOCAL.pack(LOCAL_SIGNATURE, 0, flags, 0, 0, 0, 0, 0, 0, len(name), extra_size)
    return b"%b%b%bFB%b%b" % (fixed, name, zip64, padding.to_bytes(2, "little"), b"Z" * padding)


def data_descriptor(record: Record, crc: int) -> bytes:
    """Return what follows the payload: signature, CRC-32 and sizes."""
    size = descriptor_size(record.header_offset, record.nbytes)
    if size == 0:
        return b""
    form = "<IIII" if size == 16 else "<IIQQ"
    return struct.pack(form, DESCRIPTOR_SIGNATURE, crc, record.nbytes, record.nbytes)


def central_size(record: Record) -> int:
    """Return the length in bytes of the record's entry in the central directory."""
    return _CENTRAL.size + len(record.name) + len(record.zip64)


END_RECORDS_SIZE = _END64.size + _LOCATOR64.size + _END.size


def central_directory(records: Sequence[Record], crcs: Sequence[int], offset: int) -> bytes:
    """Return the central directory and the end records.

    Parameters
    ----------
    records, crcs
        Every record in file order, and its CRC-32.
    offset
        Where the directory begins in the file.
    """
    parts = []
    for record, crc in zip(records, crcs, strict=True):
        zip64 = record.zip64
        size32 = min(record.nbytes, U32_MAX)
        parts.append(
            _CENTRAL.pack(
                CENTRAL_SIGNATURE, 0, 0, _flags(record), 0, 0, 0, crc, size32, size32, len(record.name), len(zip64),
                0, 0, 0, 0, min(record.header_offset, U32_MAX),
            )
        )  # fmt: skip
        parts.append(record.name)
        parts.append(zip64)
    directory = b"".join(parts)
    count, size = len(records), len(directory)
    end64_offset = offset + size
    return b"".join(
        (
            directory,
            _END64.pack(END64_SIGNATURE, 44, 0x031E, 0x2D, 0, 0, count, count, size, offset),
            _LOCATOR64.pack(LOCATOR64_SIGNATURE, 0, end64_offset, 1),
            _END.pack(
                END_SIGNATURE,
                0,
                0,
                min(count, U16_MAX),
                min(count, U16_MAX),
                min(size, U32_MAX),
                min(offset, U32_MAX),
                0,
            ),
        )
    )
