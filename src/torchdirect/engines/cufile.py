"""The three cuFile transfer types: synchronous calls from threads, stream-ordered calls, and batches.

Whole blocks of large storages on GPUs move by cuFile, everything else at the same time by the host engine: ragged ends
of unaligned files, headers, host tensors, and small storages, which the host moves many at a time where cuFile would
need a call for each.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from torchdirect import cufile, gpu_buffers
from torchdirect.cufile import Batch, BatchEntry, CuFileError, FileHandle, Opcode, RegisteredBuffer
from torchdirect.engines.base import EngineOptions, GpuFile, OpenFile, TransferState
from torchdirect.engines.checksums import PartChecksums
from torchdirect.engines.direct_proof import TransferCounter
from torchdirect.engines.file_io import advance, wait_again
from torchdirect.engines.host import HostEngine
from torchdirect.engines.requests import Request, split_read, split_write
from torchdirect.engines.streams import QueuedWork, queued_work
from torchdirect.engines.workers import Job, run_workers
from torchdirect.errors import CorruptCheckpointError, LoadError, TransferUnavailableError, save_error
from torchdirect.plan import Gap, Window, align_down
from torchdirect.transfer import TransferType
from torchdirect.units import BLOCK, MIB, format_bytes

Describe = Callable[[int], str]

STRAIGHT_FROM = MIB
"""Bytes of a storage from which it moves by cuFile; the host moves many smaller ones with each of its transfers."""

REGISTER_FROM = 16 * MIB
"""Bytes of a storage from which its memory is registered on a direct path: it serves several requests then."""

_STREAM_DEPTH = 2
"""Requests queued on a stream, so that it does not run dry while one is looked at."""

_BATCH_DEPTH = 32
"""Requests of a batch in flight. From 16 to 64, with 16 to 1 MiB each, the rates were equal."""

_POLL_SECONDS = 0.1

_SILENCE_SECONDS = 5.0
"""Without an answer, until entries of a refused submission count as never taken."""

_HUNG_SECONDS = 40.0
"""Without an answer, until cuFile is given up; longer than the time-out of the NVMe driver, 30 seconds by default."""

_never_answered: list[Sequence[torch.Tensor]] = []
"""Memory of batches that were given up. cuFile may still reach it, so it is kept: nothing else must take its place."""

_ENTRY_POINTS = {
    TransferType.GDS: "cuFileRead",
    TransferType.GPU_ASYNC: "cuFileReadAsync",
    TransferType.GPU_BATCH: "cuFileBatchIOSetUp",
}


class Stream(Protocol):
    """A CUDA stream of a worker."""

    @property
    def handle(self) -> int:
        """The ``CUstream``."""
        ...

    def mark(self) -> Callable[[], None]:
        """Return a function that waits until the stream has done what is queued on it now."""
        ...

    def synchronize(self) -> None:
        """Wait until the stream has done everything."""
        ...


class Devices(Protocol):
    """What the engine asks of GPUs; tests give host memory the part of GPU memory."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies on a GPU."""
        ...

    def current(self, device: torch.device) -> AbstractContextManager[object]:
        """Make a GPU the current one of this thread for a while."""
        ...

    def stream(self, device: torch.device, queued: QueuedWork) -> Stream:
        """Return a new stream behind the work that the caller has queued."""
        ...


class _CudaStream:
    def __init__(self, device: torch.device, queued: QueuedWork) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        if device in queued:
            self._stream.wait_event(queued[device])

    @property
    def handle(self) -> int:
        return int(self._stream.cuda_stream)

    def mark(self) -> Callable[[], None]:
        event = self._stream.record_event()

        def wait() -> None:
            event.synchronize()

        return wait

    def synchronize(self) -> None:
        self._stream.synchronize()


class CudaDevices:
    """The GPUs of this machine."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies on a GPU."""
        return tensor.is_cuda

    def current(self, device: torch.device) -> AbstractContextManager[object]:
        """Make a GPU the current one of this thread for a while."""
        return torch.cuda.device(device)

    def stream(self, device: torch.device, queued: QueuedWork) -> Stream:
        """Return a new stream behind the work that the caller has queued."""
        return _CudaStream(device, queued)


def registration_pays(transfer_type: TransferType, direct: bool, nbytes: int) -> bool:
    """Whether to register the memory of a storage for one save or load.

    Registration lets the disk reach the memory itself, where cuFile would go through its own buffers on the GPU. In
    compatibility mode nothing reaches GPU memory but the host, and registration only costs: 2 GB took 33 ms, and reads
    were no faster. The stream calls of libcufile 1.15 moved wrong bytes at offsets into registered memory in that mode,
    so they are given none.
    """
    return direct and nbytes >= REGISTER_FROM and transfer_type is not TransferType.GPU_ASYNC


def require_unregistered(direct: bool) -> None:
    """Refuse registered memory to stream calls in compatibility mode, where libcufile 1.15 moved wrong bytes.

    Raises
    ------
    TransferUnavailableError
        Unless the path is direct.
    """
    if not direct:
        raise TransferUnavailableError(
            TransferType.GPU_ASYNC.name,
            "the memory is registered with cuFile, whose stream calls move wrong bytes to and from registered memory "
            "in its compatibility mode",
            "deregister_buffer() it, or use 'GDS' or 'GPU_BATCH'",
        )


def open_file(transfer_type: TransferType, fd: int, path: str) -> FileHandle:
    """Register a file with cuFile, whose driver stays open for the next one.

    Parameters
    ----------
    transfer_type
        One of the three.
    fd
        Opened with ``O_DIRECT`` if the file system allows.
    path
        For messages.

    Raises
    ------
    TransferUnavailableError
        If there is no libcufile, it is too old for this type, its driver does not open, or it refuses the file.
    """
    name, entry = transfer_type.name, _ENTRY_POINTS[transfer_type]
    try:
        cufile.driver.keep_open()
        if not cufile.has(entry):
            raise TransferUnavailableError(
                name, f"this libcufile has no {entry}", "Install a newer libcufile (CUDA 12.2 or later), or use 'GDS'"
            )
        return FileHandle(fd, path=path)
    except cufile.CuFileUnavailableError as exc:
        raise TransferUnavailableError(name, exc.reason, exc.remedy) from exc
    except CuFileError as exc:
        raise TransferUnavailableError(name, str(exc), "Use 'AUTO'; `torchdirect doctor` says more") from exc


class CuFileEngine:
    """Executes plans on `GDS`, `GPU_ASYNC` and `GPU_BATCH`.

    Parameters
    ----------
    options
        How it runs. Each worker of `GDS` has one request in flight, each of `GPU_ASYNC` a stream; `GPU_BATCH` has one.
    tick
        Called now and then in the calling thread.
    devices
        The GPUs.
    """

    def __init__(
        self, options: EngineOptions, tick: Callable[[], None] | None = None, devices: Devices | None = None
    ) -> None:
        self.options = options
        self.tick = tick
        self.devices: Devices = CudaDevices() if devices is None else devices

    def read(
        self,
        file: OpenFile,
        windows: Sequence[Window],
        tensors: Sequence[torch.Tensor],
        describe: Describe,
        state: TransferState,
        *,
        queued: QueuedWork | None = None,
        checksums: PartChecksums | None = None,
    ) -> None:
        """Fill `tensors` from the windows of a read plan; see `Engine.read`."""
        run = self._begin(file, tensors, queued)
        requests, rest = split_read(
            windows,
            run.straight,
            request_bytes=run.request_bytes,
            chunk_bytes=self.options.chunk_bytes,
            file_size=file.size,
        )

        def by_host(host: HostEngine) -> None:
            host.read(file, rest, tensors, describe, state, queued=run.queued, checksums=checksums)

        self._execute(_Reading(run, state, describe), requests, rest, by_host)

    def write(
        self,
        file: OpenFile,
        windows: Sequence[Window],
        gaps: Sequence[Gap],
        tensors: Sequence[torch.Tensor],
        crc: bool,
        state: TransferState,
        *,
        queued: QueuedWork | None = None,
    ) -> None:
        """Write every window of a write plan; see `Engine.write`."""
        run = self._begin(file, tensors, queued)
        requests, rest = split_write(windows, run.straight, request_bytes=run.request_bytes)
        unseen = {request.storage for request in requests}

        def by_host(host: HostEngine) -> None:
            host.write(file, rest, gaps, tensors, crc, state, queued=run.queued, unseen=unseen)

        self._execute(_Writing(run, state), requests, rest, by_host)

    def _begin(self, file: OpenFile, tensors: Sequence[torch.Tensor], queued: QueuedWork | None) -> _Run:
        if file.gpu_file is None:
            raise ValueError(f"{file.path} was not opened for {self.options.transfer_type.name}")
        straight = [self.devices.holds(t) and t.numel() >= STRAIGHT_FROM for t in tensors]
        request_bytes = self.options.chunk_bytes
        if isinstance(file.gpu_file, FileHandle):
            # Where it gives no limit, a request of one block each would be the worst answer.
            request_bytes = min(request_bytes, cufile.driver.properties().max_direct_io_kib * 1024 or request_bytes)
        request_bytes = max(BLOCK, align_down(request_bytes, BLOCK))
        queued = queued_work(tensors) if queued is None else queued
        bases = {i: base for i, t in enumerate(tensors) if (base := gpu_buffers.registered_base(t)) is not None}
        if bases and self.options.transfer_type is TransferType.GPU_ASYNC:
            require_unregistered(self.options.direct)
        return _Run(file, file.gpu_file, tensors, straight, queued, request_bytes, self.devices, bases)

    def _execute(
        self, kind: _Transfers, requests: list[Request], rest: list[Window], by_host: Callable[[HostEngine], None]
    ) -> None:
        state, options = kind.state, self.options
        state.total += sum(request.nbytes for request in requests)
        job = Job(requests)
        works = self._works(kind, job, requests)
        threads = len(works)
        if rest:
            through = TransferType.CPU_ASYNC_GPU if kind.run.file.direct_fd is not None else TransferType.CPU_CACHED_GPU
            # Its tick ends it when a cuFile worker has failed.
            host = HostEngine(replace(options, transfer_type=through, strict=False), job.check)
            works.insert(0, lambda: by_host(host))
            self._note_rest(kind, rest)
        counter = TransferCounter()
        with self._registered(kind, requests):
            # With a tick all works run in threads, and an interrupt in this one cannot hit them.
            run_workers(job, works, tick=self.tick or _nothing)
        if threads or not rest:  # else the host engine has told how many it took
            state.num_threads = max(1, threads)
        state.direct = (options.direct and counter.moved() is not False) if requests else None

    def _note_rest(self, kind: _Transfers, rest: Sequence[Window]) -> None:
        indices = {extent.storage for window in rest for extent in window.extents}
        left = [i for i in indices if not kind.run.straight[i]]
        if left:
            nbytes = sum(kind.run.tensors[i].numel() for i in left)
            kind.state.fell_back(
                f"{len(left)} of {len(kind.run.tensors)} storages ({format_bytes(nbytes)}) are small or in host memory "
                "and moved by way of the host"
            )

    def _works(self, kind: _Transfers, job: Job[Request], requests: Sequence[Request]) -> list[Callable[[], None]]:
        if not requests:
            return []
        if self.options.transfer_type is TransferType.GPU_BATCH:
            return [lambda: _run_batch(kind, job)]
        body = _run_calls if self.options.transfer_type is TransferType.GDS else _run_streams
        return [lambda: body(kind, job)] * min(self.options.num_threads, len(requests))

    @contextlib.contextmanager
    def _registered(self, kind: _Transfers, requests: Sequence[Request]) -> Iterator[None]:
        """Register the memory of storages where it pays; it is deregistered before anybody can free it."""
        with contextlib.ExitStack() as stack:
            for storage in dict.fromkeys(request.storage for request in requests):
                tensor = kind.run.tensors[storage]
                if storage in kind.run.bases:
                    continue
                if registration_pays(self.options.transfer_type, self.options.direct, tensor.numel()):
                    try:
                        with self.devices.current(tensor.device):
                            stack.enter_context(RegisteredBuffer(tensor.data_ptr(), tensor.numel()))
                        kind.run.bases[storage] = tensor.data_ptr()
                    except CuFileError as exc:
                        kind.state.fell_back(f"cuFile registers no more GPU memory ({exc.name}); went on without")
                        break
            yield


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class _Run:
    """What one read or write works on."""

    file: OpenFile
    handle: GpuFile
    tensors: Sequence[torch.Tensor]
    straight: Sequence[bool]
    queued: QueuedWork
    request_bytes: int
    devices: Devices
    bases: dict[int, int]
    """Where the registered buffer of a storage begins, by index of the storage."""

    @property
    def registered(self) -> FileHandle:
        """The file for streams and batches."""
        assert isinstance(self.handle, FileHandle)
        return self.handle

    def device(self, request: Request) -> torch.device:
        return self.tensors[request.storage].device

    def range_of(self, r: Request) -> tuple[int, int, int, int]:
        """Return what cuFile is to be told of a request: address, bytes, file offset, offset from the address.

        A registered buffer is named by its base. Any other memory is named by the address itself: libcufile 1.15 takes
        the first request at an address for all of its buffer, and its stream calls refuse what lies beyond.
        """
        address = self.tensors[r.storage].data_ptr() + r.storage_offset + r.done
        base = self.bases.get(r.storage, address)
        return base, r.nbytes - r.done, r.file_offset + r.done, address - base

    def wait_for_caller(self) -> None:
        """Wait for what the caller has queued: cuFile's synchronous and batch calls know no streams."""
        for event in self.queued.values():
            event.synchronize()


class _Transfers:
    """What reading and writing differ in."""

    opcode: Opcode

    def __init__(self, run: _Run, state: TransferState) -> None:
        self.run = run
        self.state = state

    def call(self, request: Request) -> int:
        """Move what is left of a request, or a part; return the bytes moved."""
        raise NotImplementedError

    def queue(self, request: Request, stream: Stream) -> cufile.AsyncRequest:
        """Queue what is left of a request on a stream."""
        raise NotImplementedError

    def failed(self, request: Request, exc: OSError) -> BaseException:
        """Return the error to raise for a request."""
        raise NotImplementedError

    def moved(self, request: Request, count: int) -> Request | None:
        """Take note of bytes that a call has moved; return what is left, if anything.

        A call that stops early is taken up again on a block boundary, since offsets must stay aligned.
        """
        if count <= 0:
            raise self.failed(request, OSError(errno.EIO, "cuFile moved nothing and gave no error"))
        try:
            done, deadline = advance(
                BLOCK, request.file_offset, request.done, count, request.nbytes, request.deadline, self.state
            )
        except OSError as exc:
            raise self.failed(request, exc) from exc
        if done >= request.nbytes:
            self.state.advance(request.nbytes)
            return None
        return request._replace(done=done, deadline=deadline)

    def again(self, request: Request, exc: CuFileError) -> Request:
        """Return a request that was interrupted, to be tried again; raise for any other error."""
        if exc.code == 0 and exc.errno in (errno.EAGAIN, errno.EINTR):
            deadline = wait_again(request.deadline, self.state)
            if deadline:
                return request._replace(deadline=deadline)
        raise self.failed(request, exc) from exc


class _Reading(_Transfers):
    opcode = Opcode.READ

    def __init__(self, run: _Run, state: TransferState, describe: Describe) -> None:
        super().__init__(run, state)
        self._describe = describe

    def call(self, r: Request) -> int:
        return self.run.handle.read(*self.run.range_of(r))

    def queue(self, r: Request, stream: Stream) -> cufile.AsyncRequest:
        return cufile.read_async(self.run.registered, *self.run.range_of(r), stream=stream.handle)

    def moved(self, request: Request, count: int) -> Request | None:
        """See `_Transfers.moved`; a read also stops early where the file ends."""
        reached = request.done + max(count, 0)
        if reached < request.nbytes and os.fstat(self.run.file.fd).st_size <= request.file_offset + reached:
            raise self._cut_short(request._replace(done=reached))
        return super().moved(request, count)

    def failed(self, request: Request, exc: OSError) -> BaseException:
        path, name = self.run.file.path, self._describe(request.storage)
        offset = request.file_offset + request.done
        return LoadError(
            f"{path}: reading {request.nbytes} bytes at offset {request.file_offset} ({name}): {exc}. "
            "The old content of the tensors that were being loaded is lost; check the storage and load again",
            exc.errno,
            path,
            offset,
            name,
        )

    def _cut_short(self, request: Request) -> BaseException:
        return CorruptCheckpointError(
            f"{self.run.file.path}: the file ends at offset {request.file_offset + request.done}, within "
            f"{self._describe(request.storage)} ({request.nbytes} bytes at offset {request.file_offset}): it became "
            "shorter while it was read, or its directory lies. Take an intact copy"
        )


class _Writing(_Transfers):
    opcode = Opcode.WRITE

    def call(self, r: Request) -> int:
        return self.run.handle.write(*self.run.range_of(r))

    def queue(self, r: Request, stream: Stream) -> cufile.AsyncRequest:
        return cufile.write_async(self.run.registered, *self.run.range_of(r), stream=stream.handle)

    def failed(self, request: Request, exc: OSError) -> BaseException:
        doing = (
            f"writing {request.nbytes} bytes at offset {request.file_offset} "
            f"(storage {request.storage}, record 'data/{request.storage}') by cuFile ({exc})"
        )
        return save_error(exc, self.run.file.path, doing)


def _run_calls(kind: _Transfers, job: Job[Request]) -> None:
    """Move requests one after another by synchronous calls; as many threads do this as requests are to be in flight."""
    kind.run.wait_for_caller()
    while (request := job.take()) is not None:
        left: Request | None = request
        with kind.run.devices.current(kind.run.device(request)):
            while left is not None:
                job.check()
                try:
                    count = kind.call(left)
                except CuFileError as exc:
                    left = kind.again(left, exc)
                else:
                    left = kind.moved(left, count)


def _run_streams(kind: _Transfers, job: Job[Request]) -> None:
    """Keep a few requests queued on a stream for each GPU of this worker."""
    run = kind.run
    streams: dict[torch.device, Stream] = {}
    flying: deque[tuple[Request, cufile.AsyncRequest, Callable[[], None]]] = deque()
    unfinished: deque[Request] = deque()
    try:
        while True:
            while len(flying) < _STREAM_DEPTH:
                job.check()
                request = unfinished.popleft() if unfinished else job.take()
                if request is None:
                    break
                device = run.device(request)
                with run.devices.current(device):
                    if device not in streams:
                        streams[device] = run.devices.stream(device, run.queued)
                    stream = streams[device]
                    try:
                        queued = kind.queue(request, stream)
                    except CuFileError as exc:
                        unfinished.append(kind.again(request, exc))
                        continue
                    # Known before it is marked: a mark that fails must not lose what the stream will write to.
                    flying.append((request, queued, stream.synchronize))
                    flying[-1] = (request, queued, stream.mark())
            if not flying:
                return
            request, queued, wait = flying[0]
            wait()
            left: Request | None
            try:
                count = queued.result()
            except CuFileError as exc:
                left = kind.again(request, exc)
            else:
                left = kind.moved(request, count)
            flying.popleft()
            if left is not None:
                unfinished.append(left)
    finally:
        # Also after an error: no stream may write to memory, or store a result, when this has returned. Every stream
        # is waited for, whatever the others answer, and only then is anything let go: the stack runs backwards.
        with contextlib.ExitStack() as ends:
            for _, queued, _ in flying:
                ends.callback(queued.discard)
            for stream in streams.values():
                ends.callback(stream.synchronize)


def _run_batch(kind: _Transfers, job: Job[Request]) -> None:
    """Keep a batch full: as completions arrive, in any order, new requests take their places."""
    kind.run.wait_for_caller()
    capacity = min(_BATCH_DEPTH, cufile.driver.properties().max_batch_entries or _BATCH_DEPTH)
    waiting: dict[torch.device, deque[Request]] = defaultdict(deque)
    while (request := job.take()) is not None:
        waiting[kind.run.device(request)].append(request)
    for device, requests in waiting.items():
        with kind.run.devices.current(device), Batch(capacity) as batch:
            flying: dict[int, Request] = {}
            try:
                _feed(kind, job, batch, requests, flying)
            finally:
                _drain(batch, flying, kind.run.tensors)


def _feed(
    kind: _Transfers, job: Job[Request], batch: Batch, requests: deque[Request], flying: dict[int, Request]
) -> None:
    """Move `requests`; `flying` holds those that cuFile has taken and not answered, by cookie."""
    run = kind.run
    cookies = iter(range(1, 1 << 62))
    while requests or flying:
        job.check()
        sent: dict[int, Request] = {}
        while requests and len(flying) + len(sent) < batch.capacity:
            sent[next(cookies)] = requests.popleft()
        if sent:
            try:
                batch.submit(
                    [BatchEntry(run.registered, kind.opcode, *run.range_of(r), cookie) for cookie, r in sent.items()]
                )
            except CuFileError as exc:
                raise kind.failed(next(iter(sent.values())), exc) from exc
            flying.update(sent)
        try:
            events = batch.poll(1, _POLL_SECONDS)
        except CuFileError as exc:
            raise kind.failed(next(iter(flying.values())), exc) from exc
        # All of them are answered, also those behind one that fails.
        for request, event in [(flying.pop(event.cookie), event) for event in events]:
            try:
                left = kind.moved(request, event.bytes_done(run.file.path))
            except CuFileError as exc:
                left = kind.again(request, exc)
            if left is not None:
                requests.append(left)


def _drain(batch: Batch, flying: dict[int, Request], tensors: Sequence[torch.Tensor]) -> None:
    """Wait for what is in flight: its memory may be freed as soon as this has returned.

    Nothing is cancelled: libcufile 1.15 never tells of an entry that it has cancelled, so nobody would know when its
    memory is free. Closing the batch cancels what is left after this.
    """
    silent_since = time.monotonic()
    with contextlib.suppress(CuFileError):
        # Whatever else is outstanding comes from a submission that was refused: cuFile may never tell of it.
        while batch.outstanding and time.monotonic() < silent_since + (_HUNG_SECONDS if flying else _SILENCE_SECONDS):
            for event in batch.poll(1, _POLL_SECONDS):
                silent_since = time.monotonic()
                flying.pop(event.cookie, None)
    if flying:
        _never_answered.append(tensors)


__all__ = ["CuFileEngine", "CudaDevices", "Devices", "Stream", "open_file", "registration_pays", "require_unregistered"]
