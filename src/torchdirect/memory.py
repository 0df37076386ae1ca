"""Raw memory: views of addresses, and the pool of staging buffers that host-path engines bounce through."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torchdirect.plan import align_up
from torchdirect.units import BLOCK

_PyBUF_READ, _PyBUF_WRITE = 0x100, 0x200
_memoryview_from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_memoryview_from_memory.restype = ctypes.py_object
_memoryview_from_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE = 14
_MADV_DONTFORK = 10
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_POPULATE_BYTES = 256 << 20
_POPULATE_THREADS = 8


def view(address: int, nbytes: int, *, writable: bool) -> memoryview:
    """Return a byte view of raw memory; the caller keeps that memory alive while the view is used."""
    flags = _PyBUF_WRITE if writable else _PyBUF_READ
    result: memoryview = _memoryview_from_memory(address, nbytes, flags)
    return result


def copy(destination: int, source: int, nbytes: int) -> None:
    """Copy `nbytes` between two addresses without holding the interpreter lock."""
    ctypes.memmove(destination, source, nbytes)


def advise_huge_pages(address: int, nbytes: int) -> None:
    """Ask the kernel for 2 MiB pages under a fresh range: one page fault where there would be 512.

    Only advice: a kernel without transparent huge pages refuses it, and nothing changes.
    """
    start = -(-address // HUGE_PAGE) * HUGE_PAGE
    end = (address + nbytes) // HUGE_PAGE * HUGE_PAGE
    if end > start:
        _libc.madvise(start, end - start, _MADV_HUGEPAGE)


def populate(address: int, nbytes: int) -> None:
    """Fault in a fresh page-aligned range, without holding the interpreter lock; an older kernel leaves it as it is.

    A large one by several threads: the kernel zeroes its pages, which one thread does at a fraction of memory's speed.
    """
    if nbytes <= _POPULATE_BYTES:
        _libc.madvise(address, nbytes, _MADV_POPULATE_WRITE)
        return
    share = align_up(-(-nbytes // _POPULATE_THREADS), HUGE_PAGE)
    parts = [(address + at, min(share, nbytes - at)) for at in range(0, nbytes, share)]
    threads = [threading.Thread(target=_libc.madvise, args=(*part, _MADV_POPULATE_WRITE)) for part in parts]
    started = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
    except RuntimeError:
        pass  # no more threads are to be had: what is left is faulted in when it is used
    finally:
        for thread in started:
            thread.join()


def keep_from_children(address: int, nbytes: int) -> None:
    """Leave a page-aligned range out of processes that are forked; they must never touch it, nor unmap it.

    The kernel copies pinned pages when a process forks, at once: a DataLoader's worker would take as much memory again.
    """
    _libc.madvise(address, nbytes, _MADV_DONTFORK)


@contextmanager
def mapped(fd: int, nbytes: int) -> Iterator[int]:
    """Map the first `nbytes` of a file for writing; yield the address. Every one of its blocks must be there already.

    Where the file system has no room for a block, a write to the mapping ends the process.
    """
    with mmap.mmap(fd, nbytes) as mapping:
        anchor = ctypes.c_char.from_buffer(mapping)
        try:
            yield ctypes.addressof(anchor)
        finally:
            del anchor


def bytes_tensor(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a one-dimensional uint8 tensor over all of `storage`, sharing its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a one-dimensional uint8 tensor over the bytes of a contiguous tensor, sharing its memory."""
    first = tensor.storage_offset() * tensor.element_size()
    return bytes_tensor(tensor.untyped_storage())[first : first + tensor.nbytes]


_NOT_INHERITED_FROM = 64 << 20
"""Bytes of a buffer from which forked processes are spared it."""


class StagingBuffer:
    """A block-aligned host buffer; pinned (registered with CUDA) if it serves copies to and from a GPU.

    Attributes
    ----------
    address
        Of its first byte.
    memory, tensor
        Its bytes, as a writable view and as a one-dimensional uint8 tensor.
    """

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self.nbytes = nbytes
        self.pinned = pinned
        # On huge pages the kernel's copies out of the page cache run up to 1.6 times as fast. They must be asked for
        # before the first touch, and the buffer must begin on one.
        self._map = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._anchor: ctypes.c_char | None = ctypes.c_char.from_buffer(self._map)
        start = ctypes.addressof(self._anchor)
        self.address = -(-start // HUGE_PAGE) * HUGE_PAGE
        advise_huge_pages(self.address, nbytes)
        if nbytes >= _NOT_INHERITED_FROM:
            keep_from_children(self.address, nbytes)
        self.memory = memoryview(self._map)[self.address - start : self.address - start + nbytes]
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes, offset=self.address - start)
        if pinned:
            # First touch costs most of the pinning, and CUDA would do it for one thread at a time.
            populate(self.address, nbytes)
            # flags 1 = portable: every device may copy.
            error = int(torch.cuda.cudart().cudaHostRegister(self.address, nbytes, 1))  # type: ignore[no-untyped-call]
            if error:
                self.pinned = False
                self.close()
                raise RuntimeError(
                    f"cannot pin {nbytes} bytes of host memory for staging: CUDA error {error}. "
                    "Lower TORCHDIRECT_STAGING_BYTES, or raise the memory lock limit (ulimit -l)"
                )

    def close(self) -> None:
        """Unpin and free the memory."""
        if self._anchor is None:
            return
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self.address)  # type: ignore[no-untyped-call]
        self._anchor = None
        self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.memory = memoryview(b"")
        self.address = 0
        # Raises BufferError while a copy of `tensor` lives elsewhere; then the map goes with its last user.
        try:
            self._map.close()
        except BufferError:  # pragma: no cover - only if a caller kept the tensor
            pass


_LARGEST_EXCESS = 2
"""How many times the size asked for a free buffer may have: unpinning it and pinning another costs more."""


class StagingPool:
    """Staging buffers of one process, reused between calls, bounded in sum.

    Pinning costs more than the copies it serves, so buffers outlive the call that made them.

    Parameters
    ----------
    outgrown
        Whether free buffers go when a larger one is made: whoever needs one buffer each time has outgrown them.
    """

    def __init__(self, *, outgrown: bool = False) -> None:
        self._drops_smaller = outgrown
        self._condition = threading.Condition()
        self._free: list[StagingBuffer] = []
        self._inherited: list[StagingBuffer] = []
        self._reserved = 0

    @property
    def nbytes(self) -> int:
        """Bytes held now: free buffers and buffers in use."""
        with self._condition:
            return self._reserved + sum(b.nbytes for b in self._free)

    def release(self) -> int:
        """Free every buffer that is not in use; return the bytes freed."""
        with self._condition:
            buffers, self._free = self._free, []
            self._condition.notify_all()
        for buffer in buffers:
            buffer.close()
        return sum(b.nbytes for b in buffers)

    @contextmanager
    def lease(
        self, count: int, nbytes: int, *, pinned: bool, limit: int, minimum: int = 1, may_wait: bool = True
    ) -> Iterator[Lease]:
        """Reserve up to `count` buffers of `nbytes` each, at least `minimum`, waiting while other calls hold them.

        With ``may_wait=False`` it raises `BlockingIOError` instead of waiting. All buffers of a call are reserved at
        once, so two calls that share the pool cannot deadlock. Buffers are made on first use, by the thread that needs
        one.
        """
        with self._condition:
            while True:
                granted = min(count, (limit - self._reserved) // nbytes)
                if granted >= min(minimum, count):
                    break
                if self._reserved == 0:  # the limit is under one buffer: serve the call all the same
                    granted = min(minimum, count)
                    break
                if not may_wait:
                    raise BlockingIOError(errno.EAGAIN, f"other calls hold {self._reserved} of {limit} bytes")
                self._condition.wait()
            self._reserved += granted * nbytes
        lease = Lease(self, granted, nbytes, pinned, limit)
        try:
            yield lease
        finally:
            lease.end()

    def _take(self, nbytes: int, pinned: bool, limit: int) -> StagingBuffer:
        """Return a buffer of at least `nbytes`, of which that many are reserved; what it has more is reserved here."""
        surplus: list[StagingBuffer] = []
        with self._condition:
            largest = min(_LARGEST_EXCESS * nbytes, nbytes + limit - self._reserved)
            fitting = [b for b in self._free if nbytes <= b.nbytes <= max(nbytes, largest) and b.pinned == pinned]
            if fitting:
                buffer = min(fitting, key=lambda b: b.nbytes)
                self._free.remove(buffer)
                self._reserved += buffer.nbytes - nbytes
                return buffer
            if self._drops_smaller:
                surplus = [b for b in self._free if b.nbytes < nbytes]
                self._free = [b for b in self._free if b.nbytes >= nbytes]
            while self._free and self._reserved + sum(b.nbytes for b in self._free) > limit:
                surplus.append(self._free.pop(0))
        for buffer in surplus:
            buffer.close()
        return StagingBuffer(nbytes, pinned=pinned)

    def _give_back(self, buffers: list[StagingBuffer], reserved: int, limit: int) -> None:
        surplus: list[StagingBuffer] = []
        with self._condition:
            self._reserved -= reserved
            self._free.extend(buffers)
            while self._free and self._reserved + sum(b.nbytes for b in self._free) > limit:
                surplus.append(self._free.pop(0))
            self._condition.notify_all()
        for buffer in surplus:
            buffer.close()

    def reset_after_fork(self) -> None:
        """Forget every buffer: a child process can use neither the locks nor the CUDA registrations it inherited.

        They are kept, unused: where their pages are not inherited, other memory may soon have the same addresses, and
        closing them would unmap that.
        """
        self._condition = threading.Condition()
        self._inherited += self._free
        self._free = []
        self._reserved = 0


class Lease:
    """Buffers that one call may hold."""

    def __init__(self, pool: StagingPool, count: int, nbytes: int, pinned: bool, limit: int) -> None:
        self.count = count
        self.nbytes = nbytes
        self._pool, self._pinned, self._limit = pool, pinned, limit
        self._lock = threading.Lock()
        self._taken: list[StagingBuffer] = []

    def take(self) -> StagingBuffer:
        """Return one of the leased buffers; it goes back to the pool when the lease ends."""
        with self._lock:
            if len(self._taken) >= self.count:
                raise RuntimeError(f"all {self.count} staging buffers of this call are in use")
            placeholder = len(self._taken)
            self._taken.append(None)  # type: ignore[arg-type]
        buffer = self._pool._take(self.nbytes, self._pinned, self._limit)
        self._taken[placeholder] = buffer
        return buffer

    def end(self) -> None:
        """Return every buffer. The caller has waited for all copies that use them."""
        buffers = [b for b in self._taken if b is not None]
        self._taken = []
        excess = sum(b.nbytes - self.nbytes for b in buffers)
        self._pool._give_back(buffers, self.count * self.nbytes + excess, self._limit)


staging_pool = StagingPool()
"""What engines bounce through."""

snapshot_pool = StagingPool(outgrown=True)
"""What background saves copy to when they are called: one buffer for each pending save."""

os.register_at_fork(after_in_child=staging_pool.reset_after_fork)
os.register_at_fork(after_in_child=snapshot_pool.reset_after_fork)


def release_staging() -> int:
    """Free the buffers that are kept for the next save or load; return the bytes freed.

    Those are staging buffers, and the snapshots of background saves that have ended.
    """
    return staging_pool.release() + snapshot_pool.release()


_PLACED_FROM = 256 << 10
_DTYPE_ALIGNMENT = 16


def allocate(nbytes: int, device: torch.device, file_offset: int, *, pinned: bool) -> torch.Tensor:
    """Return a uint8 tensor over a storage of its own, of `nbytes`, not initialised.

    A large one in host memory has an address at the same place in a 4 KiB block as `file_offset` in the file. Then
    every block of the file that lies inside it can be read straight into it, whatever alignment the device asks of
    memory. Small ones share a window of the file with others and gain nothing from it; and where the file itself is not
    aligned for every dtype, the storage is.
    """
    if device.type != "cpu":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    if nbytes < _PLACED_FROM or file_offset % _DTYPE_ALIGNMENT:
        return torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)
    whole = torch.empty(nbytes + BLOCK, dtype=torch.uint8, device=device, pin_memory=pinned).untyped_storage()
    if not pinned:
        advise_huge_pages(whole.data_ptr(), nbytes + BLOCK)
    shift = (file_offset - whole.data_ptr()) % BLOCK
    return bytes_tensor(whole[shift : shift + nbytes])
