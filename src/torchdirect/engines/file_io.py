"""One transfer between a descriptor and memory, with what the kernel may do short of it.

A call may move fewer bytes than asked, be interrupted, or be told to try again. With ``O_DIRECT`` it goes on from the
last block boundary, since offset, length and address must stay aligned.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable

from torchdirect.engines.base import OpenFile, TransferState
from torchdirect.errors import CorruptCheckpointError, LoadError

_AGAIN_LIMIT_S = 30.0


class DirectRefusedError(Exception):
    """The file system accepted ``O_DIRECT`` at open and refuses the first transfer."""


def read_into(
    file: OpenFile,
    fd: int,
    memory: memoryview,
    offset: int,
    wanted: int,
    state: TransferState,
    describe: Callable[[], str],
) -> None:
    """Read from `offset` until the first `wanted` bytes of `memory` are there.

    `memory` may be longer than `wanted`, to give a direct read whole blocks past the end of the file.

    Raises
    ------
    DirectRefusedError
        If a direct read is refused with ``EINVAL``.
    CorruptCheckpointError
        If the file ends before.
    LoadError
        If the read fails; names file, offset and what `describe` says the bytes are.
    """
    direct = fd == file.direct_fd
    block = file.offset_align if direct else 1
    got = 0
    deadline = 0.0
    while got < wanted:
        try:
            count = os.preadv(fd, [memory[got:]], offset + got)
            if count and not (direct and _ends_at(file, offset + got + count)):
                got, deadline = advance(block, offset, got, count, wanted, deadline, state)
                continue
        except OSError as exc:
            if exc.errno == errno.EAGAIN:
                deadline = wait_again(deadline, state)
                if deadline:
                    continue
            if direct and exc.errno == errno.EINVAL:
                raise DirectRefusedError from exc
            what = describe()
            raise LoadError(
                f"{file.path}: reading {wanted} bytes at offset {offset} ({what}): {exc.strerror}. "
                "The old content of the tensors that were being loaded is lost; check the storage and load again",
                exc.errno,
                file.path,
                offset + got,
                what,
            ) from exc
        got += count
        if got < wanted:
            raise CorruptCheckpointError(
                f"{file.path}: the file ends at offset {offset + got}, within {describe()} ({wanted} bytes at offset "
                f"{offset}): it became shorter while it was read, or its directory lies. Take an intact copy"
            )


def write_all(file: OpenFile, fd: int, memory: memoryview, offset: int, state: TransferState) -> None:
    """Write all of `memory` at `offset`.

    Raises
    ------
    DirectRefusedError
        If a direct write is refused with ``EINVAL``.
    OSError
        As the kernel says.
    """
    direct = fd == file.direct_fd
    block = file.offset_align if direct else 1
    put = 0
    deadline = 0.0
    while put < len(memory):
        try:
            count = os.pwritev(fd, [memory[put:]], offset + put)
        except OSError as exc:
            if exc.errno == errno.EAGAIN:
                deadline = wait_again(deadline, state)
                if deadline:
                    continue
            if direct and exc.errno == errno.EINVAL:
                raise DirectRefusedError from exc
            raise
        if count == 0:
            raise OSError(errno.EIO, "the kernel wrote nothing and gave no error")
        put, deadline = advance(block, offset, put, count, len(memory), deadline, state)


def _ends_at(file: OpenFile, position: int) -> bool:
    """Whether a direct read stopped where the file ends: only there does it return less than whole blocks."""
    return position % file.offset_align != 0 and os.fstat(file.fd).st_size <= position


def advance(
    block: int, offset: int, done: int, count: int, wanted: int, deadline: float, state: TransferState
) -> tuple[int, float]:
    """Return how far a transfer is after `count` more bytes, on a boundary of `block` bytes in the file, and when to
    give up if it does not move.

    Raises
    ------
    OSError
        If it has stayed within one block for too long.
    """
    reached = done + count
    if reached >= wanted:
        return reached, 0.0
    state.retried()
    reached -= (offset + reached) % block
    if reached > done:
        return reached, 0.0
    deadline = wait_again(deadline, state)
    if not deadline:
        raise OSError(errno.EIO, f"transfers at offset {offset + done} stop within a block")
    return done, deadline


def wait_again(deadline: float, state: TransferState) -> float:
    """Sleep a moment before another try; return when to give up, or 0.0 if that time has come."""
    now = time.monotonic()
    if deadline and now > deadline:
        return 0.0
    state.retried()
    time.sleep(0.002)
    return deadline or now + _AGAIN_LIMIT_S
