"""What happens when memory, locked memory or patience runs out."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchdirect as td
from torchdirect import memory


def in_child(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_host_memory_that_runs_out(tmp_path: Path) -> None:
    big, small = tmp_path / "big.pt", tmp_path / "small.pt"
    td.save({"w": torch.zeros(150_000_000)}, big, durable=False)
    td.save({"w": torch.ones(2_000_000)}, small, durable=False)

    def work() -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + (400 << 20), resource.RLIM_INFINITY))
        descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        with pytest.raises((RuntimeError, MemoryError), match=r"memory|alloc"):
            td.load(big, transfer_type="CPU_ONLY")
        assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (descriptors, threads)
        assert memory.staging_pool._reserved == 0
        assert bool((td.load(small, transfer_type="CPU_ONLY", num_threads=1)["w"] == 1).all())

    assert in_child(work) == 0


def test_memory_that_cannot_be_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Runtime:
        def cudaHostRegister(self, *_: Any) -> int:  # noqa: N802 - CUDA's name
            return 2

        def cudaHostUnregister(self, *_: Any) -> int:  # noqa: N802
            raise AssertionError("what was not registered is unregistered")

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    pool = memory.StagingPool()
    match = r"cannot pin 1048576 bytes.*TORCHDIRECT_STAGING_BYTES.*ulimit -l"
    with pool.lease(2, 1 << 20, pinned=True, limit=1 << 22) as lease, pytest.raises(RuntimeError, match=match):
        lease.take()
    assert (pool._reserved, pool.nbytes) == (0, 0)


@pytest.mark.parametrize("call", ["save", "load"])
def test_progress_stays_alive_on_slow_storage(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, state = tmp_path / "a.pt", {"w": torch.ones(400_000)}
    td.save(state, path, durable=False)
    name = "pwritev" if call == "save" else "preadv"
    real: Callable[..., int] = getattr(os, name)

    def slow(*arguments: Any) -> int:
        time.sleep(0.5)
        return real(*arguments)

    monkeypatch.setattr(os, name, slow)
    seen: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        seen.append((done, total))

    options: dict[str, Any] = {"progress": progress, "transfer_type": "CPU_CACHED_GPU"}
    if call == "save":
        td.save(state, path, durable=False, **options)
    else:
        td.load(path, **options)
    waiting = [done for done, total in seen if done < total]
    assert len(waiting) >= 3, "it is told several times while one transfer takes its time"
    assert seen[-1][0] == seen[-1][1] > 0
