"""Snapshots of GPU tensors, with host memory in the place of a GPU's: what is copied where, and in which order."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torchdirect as td
from torchdirect import defaults, memory, snapshot

MIB = 1 << 20


class OnGpu(torch.Tensor):
    """A host tensor that says it is on a GPU; its device stays the CPU, where its memory is."""

    is_cuda = True

    def get_device(self) -> int:
        return 0


class Machine:
    """Stands for the CUDA driver and runtime; keeps a list of what was asked of them."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.cuda_stream = 7
        self.pins = True
        self.mode = 0

    def bind(self, device: int) -> None:
        pass

    def from_device(self, host: int, device: int, nbytes: int, stream: int) -> None:
        assert stream == self.cuda_stream
        self.calls.append(f"copy {nbytes}")
        memory.copy(host, device, nbytes)

    def exchange_capture_mode(self, mode: int = 2) -> int:
        before, self.mode = self.mode, mode
        return before

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        assert self.mode == 2, "memory is pinned while others may capture a graph"
        self.calls.append(f"pin {nbytes}")
        return 0 if self.pins else 2

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name
        return 0

    def event(self, blocking: bool) -> Any:
        assert blocking
        machine = self

        class Event:
            def record(self, stream: Any) -> None:
                assert stream is machine
                machine.calls.append("record")

            def synchronize(self) -> None:
                assert machine.mode == 2
                machine.calls.append("wait")

        return Event()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    td.release_staging()
    made = Machine()
    monkeypatch.setattr(snapshot, "cuda_driver", lambda: made)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made)
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield made
    td.release_staging()
    assert memory.snapshot_pool._reserved == 0
    assert made.mode == 0


def bytes_on(gpu: bool, nbytes: int) -> torch.Tensor:
    tensor = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
    return tensor.as_subclass(OnGpu) if gpu else tensor


def take(tensors: list[torch.Tensor], **settings: Any) -> snapshot.Snapshot:
    return snapshot.take("a.pt", tensors, [4096 * i for i in range(len(tensors))], defaults.current(**settings))


def mixed() -> list[torch.Tensor]:
    sizes = [5, 3 * MIB, 0, 70_000, 2 * MIB, 1, 2 * MIB - 1, 100, 2 * MIB + 9, 64, 4096]
    return [bytes_on(i % 3 != 0, nbytes) for i, nbytes in enumerate(sizes)]


def equal(taken: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(taken) == len(expected) and all(torch.equal(a, b) for a, b in zip(taken, expected, strict=True))


@pytest.mark.parametrize("staging", ["host", "device"])
@pytest.mark.parametrize("inference", [True, False])
def test_every_byte_is_copied(staging: str, inference: bool, machine: Machine) -> None:
    tensors = mixed()
    expected = [t.as_subclass(torch.Tensor).clone() for t in tensors]
    with torch.inference_mode(inference):
        taken = take(tensors, staging=staging)
    for tensor in tensors:
        tensor.zero_()
    taken.wait()
    assert taken.staging == staging
    assert taken.nbytes == sum(t.numel() for t in expected)
    assert equal(taken.tensors, expected)
    taken.release()


def test_small_ones_are_gathered_and_copied_in_runs(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_GATHER_BYTES", 100_000)
    tensors = [bytes_on(True, 1000 + i) for i in range(500)]
    expected = [t.as_subclass(torch.Tensor).clone() for t in tensors]
    taken = take(tensors)
    copies = [int(call.split()[1]) for call in machine.calls if call.startswith("copy")]
    assert len(copies) <= 9
    assert all(nbytes <= 100_000 for nbytes in copies)
    assert machine.calls[-1] == "record"
    assert equal(taken.tensors, expected)
    taken.release()


def test_large_ones_lie_as_in_the_file_and_are_copied_by_themselves(machine: Machine) -> None:
    tensors = [bytes_on(True, 2 * MIB + i) for i in range(3)]
    offsets = [100, 5 * MIB + 4000, 9 * MIB]
    taken = snapshot.take("a.pt", tensors, offsets, defaults.current())
    assert [c for c in machine.calls if c.startswith("copy")] == [f"copy {t.numel()}" for t in tensors]
    assert [t.data_ptr() % 4096 for t in taken.tensors] == [offset % 4096 for offset in offsets]
    taken.release()


def test_the_copies_are_waited_for_before_memory_is_used_again(machine: Machine) -> None:
    taken = take(mixed())
    assert "wait" not in machine.calls
    taken.release()
    assert machine.calls[-2:] == ["record", "wait"]
    pinned = [c for c in machine.calls if c.startswith("pin")]
    take(mixed()).release()
    assert [c for c in machine.calls if c.startswith("pin")] == pinned, "the buffer is pinned once"


@pytest.mark.parametrize("where", ["_copy_out", "_gather_into", "copy_in_host_memory"])
def test_an_interrupt_waits_for_what_was_queued(where: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(snapshot, where, interrupt)
        with pytest.raises(KeyboardInterrupt):
            take(mixed())
    assert machine.calls[-2:] == ["record", "wait"]


def test_without_gpu_memory_to_gather_in(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError

    tensors = mixed()
    expected = [t.as_subclass(torch.Tensor).clone() for t in tensors]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", fail)
        taken = take(tensors)
    assert equal(taken.tensors, expected)
    taken.release()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", fail)
        with pytest.raises(td.SaveError, match=r"a\.pt.*staging='device'.*free GPU memory") as caught:
            take(tensors, staging="device")
    assert caught.value.errno == errno.ENOMEM
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", fail)
        with pytest.warns(td.TransferFallbackWarning, match="no room"):
            taken = take(tensors, staging="device", fallback="warn")
    assert taken.staging == "host"
    assert equal(taken.tensors, expected)
    taken.release()


def test_memory_that_cannot_be_pinned(machine: Machine) -> None:
    machine.pins = False
    tensors = mixed()
    with pytest.raises(td.SaveError, match=r"pinned host memory cannot be had.*ulimit -l.*staging='auto'") as caught:
        take(tensors, staging="host")
    assert caught.value.errno == errno.ENOMEM
    with pytest.warns(td.TransferFallbackWarning, match="cannot be pinned"):
        take(tensors, staging="host", fallback="warn").release()
    taken = take(tensors)
    assert any("cannot be pinned" in text for text in taken.fallbacks)
    assert equal(taken.tensors, [t.as_subclass(torch.Tensor) for t in tensors])
    taken.release()


@pytest.mark.parametrize("free", [100 * MIB, 10 * MIB])
def test_over_the_bound_it_stays_on_the_gpu_if_there_is_room(
    free: int, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("mem_get_info", (free, 200 * MIB)), ("memory_reserved", 0), ("memory_allocated", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    tensors = [bytes_on(True, 9 * MIB), bytes_on(False, MIB)]
    if free > 50 * MIB:
        taken = take(tensors, snapshot_bytes=5 * MIB)
        assert taken.staging == "device"
        assert "snapshot_bytes" in taken.fallbacks[0]
        assert equal(taken.tensors, [t.as_subclass(torch.Tensor) for t in tensors])
        taken.release()
    else:
        with pytest.raises(td.SaveError, match=r"snapshot_bytes.*TORCHDIRECT_SNAPSHOT_BYTES"):
            take(tensors, snapshot_bytes=5 * MIB)


def test_a_cufile_type_keeps_the_copy_on_the_gpu(machine: Machine) -> None:
    taken = take(mixed(), transfer_type="GDS")
    assert taken.staging == "device"
    taken.release()
    with pytest.raises(td.SettingsError, match=r"staging='host'.*GDS"):
        take(mixed(), transfer_type="GDS", staging="host")


def test_a_stream_that_captures_is_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"a\.pt.*captures a CUDA graph"):
        take(mixed())
