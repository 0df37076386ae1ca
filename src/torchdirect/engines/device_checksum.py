"""CRC-32 of bytes in GPU memory, folded on the GPU, so that the host need not read what it only forwards.

CRC-32 is linear over GF(2). Let L be the CRC register after a message, begun from zero and without the final
inversion, and Z(k, x) the register x after k more zero bytes. For words of 32 bits a and b that lie k bytes apart, the
message with b replaced by ``Z(k, a) ^ b`` and a by zero has the same L, and leading zeros do not change L. So a long
message folds, row onto row, to one short row with the same L, and the host takes the CRC of that. Z is applied by two
lookups in tables of 2**16 entries, one for each half of the word.

Where much is to be folded at once, PyTorch compiles a kernel that takes in seven rows, with the 32 columns of Z in its
code; see `torch.cuda.jiterator`. It is kept on disk for later processes.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

import torch

from torchdirect import checksum
from torchdirect.memory import view

ROW_WORDS = 1 << 21
"""Words in the row that a message is folded to: 8 MiB, of which four are held in GPU memory at a time."""

RESIDUE_WORDS = 1 << 16
"""Words left to the host: 256 KiB, at 10 GB/s some 25 microseconds."""

FOLD_FROM = 4 << 20
"""Bytes from which folding on the GPU pays."""

COMPILE_FROM = 1 << 30
"""Bytes that are folded together from which a compiled kernel pays: the first process waits some 0.2 s for it."""

COMPILED_ROW_WORDS = 1 << 19
"""Words in the row of the compiled kernel: 2 MiB, enough for every thread of a large GPU."""

_ROWS_AT_ONCE = 7  # jiterator takes eight tensors, and one is the row so far

_GROUP = 256
"""Tensors whose residues wait on a GPU at a time, in 64 MiB."""

logger = logging.getLogger("torchdirect")

_ONES = 0xFFFFFFFF


def advance(register: int, nbytes: int) -> int:
    """Return Z(nbytes, register): the CRC register after `nbytes` more zero bytes."""
    return checksum.combine([(register, 0), (0, nbytes)]) if register else 0


@functools.lru_cache(maxsize=64)
def _tables(nbytes: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return Z(nbytes, x) for x = 0 … 65535 in the lower and in the upper half of a word, as int32."""
    halves = []
    for shift in (0, 16):
        table = torch.zeros(1, dtype=torch.int64, device="cpu")
        for bit in range(16):
            table = torch.cat([table, table ^ advance(1 << (shift + bit), nbytes)])
        halves.append(torch.where(table > 0x7FFFFFFF, table - (1 << 32), table).to(torch.int32).to(device))
    return halves[0], halves[1]


class _Folder:
    """Scratch memory for folding one row onto another."""

    def __init__(self, words: int, device: torch.device) -> None:
        self._index, self._low, self._high = (torch.empty(words, dtype=torch.int32, device=device) for _ in range(3))

    def fold(self, row: torch.Tensor, onto: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return ``Z(row) ^ onto``; the result is scratch of this folder, or `row` itself."""
        n = row.numel()
        index, low, high = self._index[:n], self._low[:n], self._high[:n]
        torch.bitwise_and(row, 0xFFFF, out=index)
        torch.index_select(tables[0], 0, index, out=low)
        torch.bitwise_right_shift(row, 16, out=index)
        index.bitwise_and_(0xFFFF)
        torch.index_select(tables[1], 0, index, out=high)
        torch.bitwise_xor(low, high, out=row)
        return row.bitwise_xor_(onto)


def fold(words: torch.Tensor) -> torch.Tensor:
    """Return a short int32 tensor whose bytes have the same L as those of `words` (int32, on any device)."""
    device = words.device
    width = ROW_WORDS
    while width > RESIDUE_WORDS and width >= words.numel():
        width //= 2
    folder = _Folder(width, device)
    row = torch.zeros(width, dtype=torch.int32, device=device)
    ahead = words.numel() % width
    if ahead:
        row[width - ahead :] = words[:ahead]
    tables = _tables(4 * width, device)
    for start in range(ahead, words.numel(), width):
        folder.fold(row, words[start : start + width], tables)
    while row.numel() > RESIDUE_WORDS:
        half = row.numel() // 2
        row = folder.fold(row[:half], row[half:], _tables(4 * half, device))
    return row


@functools.lru_cache(maxsize=8)
def _compiled(nbytes: int) -> Callable[..., torch.Tensor]:
    """Return a function of a row and seven more, each `nbytes` behind the one before, that folds them onto the last."""
    columns = "\n".join(
        f"  r ^= (T)0x{advance(1 << bit, nbytes):08x} & -((x >> {bit}) & (T)1);" for bit in reversed(range(32))
    )
    rows = range(1, _ROWS_AT_ONCE + 1)
    code = f"""
template <typename T> T advance(T x) {{
  T r = 0;
{columns}
  return r;
}}
template <typename T> T fold(T a, {", ".join(f"T b{i}" for i in rows)}) {{
{"".join(f"  a = advance(a) ^ b{i};" for i in rows)}
  return a;
}}
"""
    function: Callable[..., torch.Tensor] = torch.cuda.jiterator._create_jit_fn(code)
    return function


def fold_compiled(words: torch.Tensor) -> torch.Tensor:
    """Return what `fold` does, of `COMPILED_ROW_WORDS` words or more, by a compiled kernel."""
    width, together = COMPILED_ROW_WORDS, _ROWS_AT_ONCE
    ahead = words.numel() % width
    rows = [words[start : start + width] for start in range(ahead, words.numel(), width)]
    if ahead:
        first = torch.zeros(width, dtype=torch.int32, device=words.device)
        first[width - ahead :] = words[:ahead]
        rows.insert(0, first)
    if missing := -(len(rows) - 1) % together:
        rows[:0] = [torch.zeros(width, dtype=torch.int32, device=words.device)] * missing
    row, kernel = rows[0], _compiled(4 * width)
    for i in range(1, len(rows), together):
        row = kernel(row, *rows[i : i + together])
    part = width // (together + 1)
    return _compiled(4 * part)(*torch.split(row, part))


def _fold(words: torch.Tensor, compiled: bool) -> torch.Tensor:
    if compiled and words.numel() >= COMPILED_ROW_WORDS:
        try:
            return fold_compiled(words)
        except torch.OutOfMemoryError:
            raise
        except Exception as exc:  # no compiler here, or none that PyTorch can use: the tables do it too
            logger.debug("cannot compile a kernel for checksums (%s); folding by tables", exc)
    return fold(words)


def crc32(data: torch.Tensor) -> int:
    """Return the CRC-32 of a one-dimensional uint8 tensor that covers a whole storage, on any device.

    Waits for the device. Falls back to copies through the host where GPU memory for the folding is missing.
    """
    return crc32_of_all([data])[0]


def crc32_of_all(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the CRC-32 of each of several tensors on one device; see `crc32`."""
    values: list[int] = []
    compiled = all(t.is_cuda for t in tensors) and sum(t.numel() for t in tensors) >= COMPILE_FROM
    for start in range(0, len(tensors), _GROUP):
        group = tensors[start : start + _GROUP]
        try:
            # All of them are queued before the first is waited for.
            residues = [_fold(data[: data.numel() // 4 * 4].view(torch.int32), compiled) for data in group]
            values += [_finish(data, residue.cpu()) for data, residue in zip(group, residues, strict=True)]
        except torch.OutOfMemoryError:
            values += [_crc32_by_host(data) for data in group]
    return values


def _finish(data: torch.Tensor, residue: torch.Tensor) -> int:
    """Return the CRC-32 of `data` by what its words were folded to."""
    whole, nbytes = data.numel() // 4 * 4, residue.numel() * 4
    crc = checksum.crc32(view(residue.data_ptr(), nbytes, writable=False))
    crc ^= advance(_ONES, nbytes) ^ advance(_ONES, whole)
    tail = bytes(data[whole:].tolist())
    return checksum.crc32(tail, crc)


def _crc32_by_host(data: torch.Tensor, step: int = 8 << 20) -> int:
    crc = 0
    for start in range(0, data.numel(), step):
        part = data[start : start + step].cpu()
        crc = checksum.crc32(view(part.data_ptr(), part.numel(), writable=False), crc)
    return crc
