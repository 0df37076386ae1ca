"""Raw memory and the pool of staging buffers."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchdirect import memory
from torchdirect.memory import StagingPool

KIB = 1 << 10
CPU = torch.device("cpu")


@given(st.integers(0, 1 << 20), st.integers(0, 1 << 40))
def test_large_storages_lie_as_their_bytes_do_in_the_file(nbytes: int, file_offset: int) -> None:
    tensor = memory.allocate(nbytes, CPU, file_offset, pinned=False)
    assert tensor.numel() == tensor.untyped_storage().nbytes() == nbytes
    assert tensor.dtype is torch.uint8
    assert tensor.data_ptr() % 16 == 0 or not nbytes
    if nbytes >= memory._PLACED_FROM and file_offset % 16 == 0:
        assert (tensor.data_ptr() - file_offset) % 4096 == 0
    tensor.fill_(7)


def test_views_are_views() -> None:
    tensor = torch.zeros(100, dtype=torch.uint8)
    view = memory.view(tensor.data_ptr() + 10, 20, writable=True)
    view[:3] = b"abc"
    assert bytes(tensor[9:14].tolist()) == b"\0abc\0"
    with pytest.raises(TypeError):
        memory.view(tensor.data_ptr(), 5, writable=False)[0] = 1
    memory.copy(tensor.data_ptr(), tensor.data_ptr() + 10, 3)
    assert bytes(tensor[:4].tolist()) == b"abc\0"


def test_buffers_are_reused_and_released() -> None:
    pool = StagingPool()
    with pool.lease(4, 64 * KIB, pinned=False, limit=KIB * KIB) as lease:
        first = {lease.take().address for _ in range(4)}
        assert len(first) == 4
        assert all(address % 4096 == 0 for address in first)
        with pytest.raises(RuntimeError, match="all 4 staging buffers"):
            lease.take()
    assert pool.nbytes == 256 * KIB
    with pool.lease(2, 64 * KIB, pinned=False, limit=KIB * KIB) as lease:
        assert {lease.take().address, lease.take().address} < first
        assert pool.release() == 128 * KIB
    assert pool.nbytes == 128 * KIB
    assert pool.release() == 128 * KIB
    assert pool.nbytes == 0


def test_larger_buffers_serve_smaller_calls_within_the_bound() -> None:
    pool, limit = StagingPool(), 256 * KIB
    with pool.lease(2, 64 * KIB, pinned=False, limit=limit) as lease:
        large = {lease.take().address for _ in range(2)}
    with pool.lease(4, 32 * KIB, pinned=False, limit=limit) as lease:
        taken = [lease.take() for _ in range(4)]
        assert large < {b.address for b in taken}, "a free buffer was not used"
        assert pool.nbytes == sum(b.nbytes for b in taken) == 192 * KIB
    assert pool._reserved == 0
    with pool.lease(8, 32 * KIB, pinned=False, limit=limit) as lease:  # all of the limit: no room for any excess
        assert {lease.take().nbytes for _ in range(8)} == {32 * KIB}
    with pool.lease(1, 8 * KIB, pinned=False, limit=limit) as lease:
        assert lease.take().nbytes == 8 * KIB, "four times the size is kept for others"
    pool.release()


def test_the_bound_holds_for_all_calls_together() -> None:
    pool, limit = StagingPool(), 256 * KIB
    worst: list[int] = []

    def call(size: int) -> None:
        for _ in range(20):
            with pool.lease(8, size, pinned=False, limit=limit, minimum=2) as lease:
                assert 2 <= lease.count <= 8
                for _ in range(lease.count):
                    lease.take()
                worst.append(pool.nbytes)

    threads = [threading.Thread(target=call, args=(size * KIB,)) for size in (16, 32, 64, 128)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "two calls that share the pool block each other"
    assert max(worst) <= limit
    assert pool._reserved == 0
    pool.release()


def test_a_limit_under_one_buffer_still_serves() -> None:
    pool = StagingPool()
    with pool.lease(3, 128 * KIB, pinned=False, limit=KIB, minimum=2) as lease:
        assert lease.count == 2
        lease.take()
    assert pool.nbytes == 0, "what is over the limit is not kept"


def test_a_child_process_begins_with_an_empty_pool() -> None:
    with memory.staging_pool.lease(1, 64 * KIB, pinned=False, limit=KIB * KIB) as lease:
        lease.take()
        with memory.staging_pool._condition:
            pid = os.fork()
            if pid == 0:
                with memory.staging_pool.lease(1, 64 * KIB, pinned=False, limit=KIB * KIB) as child:
                    child.take()
                os._exit(0 if memory.staging_pool.nbytes == 64 * KIB else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    memory.staging_pool.release()
