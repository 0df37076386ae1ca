"""`save_async`: the snapshot is taken when it is called, the file is written while the program goes on."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import errno
import functools
import io
import os
import pickle
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import IO, Any

import torch
from torch.serialization import DEFAULT_PROTOCOL

from torchdirect import checkpoint, defaults, originals, road, selection, snapshot, system
from torchdirect.checkpoint import PlannedSave
from torchdirect.defaults import Settings
from torchdirect.engines.cuda_driver import cuda_driver
from torchdirect.engines.streams import stream_pool
from torchdirect.errors import SaveError, SavePendingError
from torchdirect.pending import Job, PendingSave, writer
from torchdirect.snapshot import Snapshot
from torchdirect.transfer import TransferReport, TransferType, last_transfer

_HOST_TYPES = {
    TransferType.CPU_GPU: TransferType.CPU_ONLY,
    TransferType.CPU_ASYNC_GPU: TransferType.CPU_ONLY,
}
"""What is left of a path when its bytes are in host memory."""


def save_async(
    obj: object,
    path: str | os.PathLike[str],
    pickle_module: Any = pickle,
    pickle_protocol: int = DEFAULT_PROTOCOL,
    _use_new_zipfile_serialization: bool = True,
    _disable_byteorder_record: bool = False,
    *,
    staging: str | None = None,
    pending: str | None = None,
    transfer_type: TransferType | str | int | None = None,
    fallback: str | None = None,
    num_threads: int | None = None,
    chunk_bytes: int | None = None,
    durable: bool | None = None,
    checksum: bool | None = None,
    progress: defaults.Progress | None = None,
) -> PendingSave:
    """Save an object in the background: copy it, return, and write the copy to the file that `save` would write.

    When the call returns, the object may change. It is pickled and host tensors are copied during the call; copies of
    GPU tensors are queued on the current stream of their GPU, ahead of everything that is queued there afterwards. (As
    anywhere, a stream that is not ordered behind that one must not change the tensors before the copies are done.)

    Pending saves are written one after another, in the order of the calls. The interpreter waits for them before it
    exits. The file appears under its name only when it is complete.

    Parameters
    ----------
    obj, pickle_module, pickle_protocol
        As for `save`.
    path
        A path, not a file object.
    staging
        Where the bytes of GPU tensors are kept until they are written. ``"host"``: in pinned memory, which is kept for
        the next save (`release_staging` frees it; ``TORCHDIRECT_SNAPSHOT_BYTES`` bounds it). ``"device"``: in memory of
        the same GPU, which is faster by far while there is room. ``"auto"`` (default): in pinned memory, or where that
        cannot be had in GPU memory if twice as much is free, or else in host memory that is not pinned; where there is
        no memory at all the file is written before the call returns, with a `TransferFallbackWarning`. cuFile types
        imply ``"device"``.
    pending
        What happens while an earlier save to the same path has not ended, or earlier saves hold the memory that this
        one needs. ``"wait"`` (default): the call waits. ``"refuse"``: it raises `SavePendingError`.
    transfer_type, fallback, chunk_bytes, durable, checksum
        As for `save`. From a copy in host memory, the types that pass through it end as ``CPU_ONLY``.
    num_threads
        I/O threads; by default 4 at most (2 for many small tensors), to leave the processors to the program.
    progress
        As for `save`; called in the thread that writes.

    Returns
    -------
    PendingSave
        A future: ``result()`` waits until the file is published, and returns the report or raises what `save` would
        raise.

    Raises
    ------
    SaveError
        (``ENOMEM``) if there is no memory for the copy where ``staging="host"`` or ``"device"`` wants it.
    SavePendingError
        With ``pending="refuse"``.
    SettingsError
        If an argument or environment variable has a value that is not allowed.
    RuntimeError
        If the current stream is capturing a CUDA graph.

    Examples
    --------
    >>> pending = torchdirect.save_async(model.state_dict(), "ckpt.pt")
    >>> train_on()
    >>> pending.result()
    """
    start = time.perf_counter()
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(
            f"save_async writes to a path, not to a {type(path).__name__}: a file object would be used behind its "
            "owner's back. Use td.save for file objects"
        )
    if checksum is None and not torch.serialization.get_crc32_options():
        checksum = False
    settings = defaults.current(
        staging=staging,
        pending=pending,
        transfer_type=transfer_type,
        fallback=fallback,
        num_threads=num_threads,
        chunk_bytes=chunk_bytes,
        durable=durable,
        checksum=checksum,
        progress=progress,
    )
    name = os.fspath(path)
    save_arguments = (pickle_module, pickle_protocol, _use_new_zipfile_serialization, _disable_byteorder_record)
    future = PendingSave(name)
    with writer.calls:
        may_wait = settings.pending == "wait" and not writer.is_here
        _await_turn(name, may_wait)
        with checkpoint.gc_paused():
            planned = checkpoint.plan_save(obj, name, save_arguments, settings)
        if isinstance(planned, PlannedSave):
            job = _snapshot_job(planned, future, settings, may_wait, start)
        else:
            job = _torch_job(obj, save_arguments, planned, future, settings, start)
        future.stall_seconds = time.perf_counter() - start
        if job is not None:
            writer.submit(job)
    return future


def _await_turn(path: str, may_wait: bool) -> None:
    earlier = writer.pending(path)
    if earlier and not may_wait:
        raise SavePendingError(
            f"{path}: an earlier background save to this path has not ended. Wait for its result(), or use "
            "pending='wait'.",
            errno.EBUSY,
            path,
        )
    concurrent.futures.wait(earlier)


def _snapshot_job(
    planned: PlannedSave, future: PendingSave, settings: Settings, may_wait: bool, start: float
) -> Job | None:
    """Copy the tensors, and return what is left to do: nothing where there was no memory for a copy."""
    offsets = [0] * len(planned.tensors)
    for extent in planned.layout.extents:
        offsets[extent.storage] = extent.file_offset
    try:
        taken = snapshot.take(future.path, planned.tensors, offsets, settings, may_wait=may_wait)
    except BlockingIOError as exc:
        raise SavePendingError(
            f"{future.path}: earlier background saves hold the memory for snapshots ({exc.strerror}). Wait for their "
            "result(), raise TORCHDIRECT_SNAPSHOT_BYTES, or use pending='wait'.",
            errno.EBUSY,
            future.path,
        ) from exc
    except SaveError as exc:
        if exc.errno != errno.ENOMEM or settings.staging != "auto":
            raise
        _write_now(planned, future, settings, start, exc)
        return None
    future.staging, future.snapshot_bytes = taken.staging, taken.nbytes
    without_sources = dataclasses.replace(planned, tensors=())
    write = functools.partial(_write, without_sources, taken, future.path, settings, start)
    return Job(os.path.realpath(future.path), future, write, taken.release)


def _write_now(
    planned: PlannedSave, future: PendingSave, settings: Settings, start: float, shortage: SaveError
) -> None:
    """Write the tensors themselves before the call returns: a stall is better than a run without checkpoints."""
    text = f"{shortage.message} It was written before the call returned."
    warnings.warn(text, road.TransferFallbackWarning, stacklevel=4)
    try:
        road.write_file(future.path, planned.layout, planned.tensors, planned.crc, settings, start)
    except Exception as exc:  # raised where it is asked for, as ever
        future.set_exception(exc)
        return
    report = last_transfer()
    assert report is not None  # write_file has just made one
    future.set_result(dataclasses.replace(report, fallbacks=(text, *report.fallbacks)))


def _write(planned: PlannedSave, taken: Snapshot, path: str, settings: Settings, start: float) -> TransferReport:
    """Write a snapshot to its file."""
    requested = settings.transfer_type
    if taken.staging == "host":
        settings = dataclasses.replace(settings, transfer_type=_HOST_TYPES.get(requested, requested))
    if settings.num_threads is None:
        threads = selection.background_threads(planned.layout.file_size, len(taken.tensors), system.cpu_count())
        settings = dataclasses.replace(settings, num_threads=threads)
    try:
        taken.wait()
        with _own_streams(taken.tensors):
            road.write_file(path, planned.layout, taken.tensors, planned.crc, settings, start)
    finally:
        taken.release()
    report = last_transfer()
    assert report is not None  # write_file has just made one
    where = "host" if taken.staging == "host" else "GPU"
    return dataclasses.replace(
        report,
        requested=requested,
        reason=f"{report.reason}; in the background, from a copy in {where} memory",
        fallbacks=(*taken.fallbacks, *report.fallbacks),
    )


@contextlib.contextmanager
def _own_streams(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Give this thread streams of its own: on the default stream a save would be ordered behind queued training."""
    devices = {t.device for t in tensors if t.is_cuda}
    driver = cuda_driver()
    with contextlib.ExitStack() as stack:
        stack.enter_context(snapshot.relaxed_capture(bool(devices)))
        for device in devices:
            with torch.cuda.device(device):
                if driver is not None:
                    driver.bind(device.index)
                stream = stream_pool.take(device)
            stack.callback(stream_pool.give_back, stream)
            stack.callback(stream.synchronize)
            stack.enter_context(torch.cuda.stream(stream))
        yield


def _torch_job(
    obj: object,
    save_arguments: checkpoint.SaveArguments,
    reason: str,
    future: PendingSave,
    settings: Settings,
    start: float,
) -> Job:
    """Let ``torch.save`` write to memory, and return what is left to do."""
    buffer = io.BytesIO()
    originals.save(obj, buffer, *save_arguments)
    future.snapshot_bytes = buffer.getbuffer().nbytes

    def write() -> TransferReport:
        checkpoint.save_with_torch(future.path, functools.partial(_write_all, buffer.getbuffer()), settings)
        checkpoint.report_torch("save", future.path, settings, reason, start)
        report = last_transfer()
        assert report is not None  # report_torch has just made one
        return report

    return Job(os.path.realpath(future.path), future, write, buffer.close)


def _write_all(data: memoryview, file: IO[bytes]) -> None:
    """Write everything; an unbuffered file may take less at a time."""
    while data:
        data = data[file.write(data) :]
