"""Power loss, modelled: what was not synchronised is gone, and a rename may or may not have happened.

The file-system calls of a durable save are recorded. For every prefix of them, the model builds each state that a disk
may show after a power loss: data of a file up to its last ``fdatasync`` is there, later data is not; a rename is
certain once the directory was synchronised, and otherwise may be there or not.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import torchdirect as td

OLD = {"a": torch.zeros(300_000), "b": torch.zeros(7)}
NEW = {"a": torch.ones(300_000), "b": torch.ones(7)}


class Recorder:
    """Records writes, synchronisations and renames, by inode."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, Any]] = []
        for name in ("pwritev", "write", "ftruncate", "fsync", "fdatasync", "rename", "replace", "unlink"):
            patch.setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name: str, real: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if name == "pwritev":
                fd, buffers, offset = arguments
                data = b"".join(bytes(b) for b in buffers)
                result = real(fd, buffers, offset)
                self.calls.append(("write", (os.fstat(fd).st_ino, offset, data[:result])))
                return result
            if name == "write":
                fd, data = arguments
                at = os.lseek(fd, 0, os.SEEK_CUR)
                result = real(fd, data)
                self.calls.append(("write", (os.fstat(fd).st_ino, at, bytes(data)[:result])))
                return result
            if name == "ftruncate":
                self.calls.append(("size", (os.fstat(arguments[0]).st_ino, arguments[1])))
            if name in ("fsync", "fdatasync"):
                self.calls.append(("sync", os.fstat(arguments[0]).st_ino))
            if name in ("rename", "replace"):
                source = os.stat(arguments[0], dir_fd=keywords.get("src_dir_fd")).st_ino
                self.calls.append(("rename", (source, os.path.basename(arguments[1]))))
            if name == "unlink":
                self.calls.append(("unlink", os.path.basename(arguments[0])))
            return real(*arguments, **keywords)

        return call


def possible_states(calls: list[tuple[str, Any]], name: str, old: bytes | None, folder: int) -> list[bytes | None]:
    """Return every content that the file of this name may have after a power loss behind these calls."""
    written: dict[int, bytearray] = {}
    durable: dict[int, bytes] = {}
    certain: bytes | int | None = old
    pending: list[int] = []
    for kind, what in calls:
        if kind == "write":
            inode, offset, data = what
            content = written.setdefault(inode, bytearray())
            content.extend(bytes(max(0, offset + len(data) - len(content))))
            content[offset : offset + len(data)] = data
        elif kind == "size":
            inode, size = what
            content = written.setdefault(inode, bytearray())
            del content[size:]
            content.extend(bytes(size - len(content)))
        elif kind == "sync" and what == folder:
            if pending:
                certain, pending = pending[-1], []
        elif kind == "sync":
            durable[what] = bytes(written.get(what, b""))
        elif kind == "rename" and what[1] == name:
            pending.append(what[0])

    def shown(state: bytes | int | None) -> bytes | None:
        return durable.get(state, b"") if isinstance(state, int) else state

    return [shown(certain), *(shown(inode) for inode in pending)]


@pytest.mark.parametrize("kind", ["CPU_ONLY", "CPU_CACHED_GPU", "AUTO"])
@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
@pytest.mark.parametrize("over", [True, False])
def test_a_durable_save_survives_at_every_moment(over: bool, name: str, kind: str, tmp_path: Path) -> None:
    path, trial = tmp_path / name, tmp_path / f"trial-{name}"
    if over:
        td.save(OLD, path)
    old = path.read_bytes() if over else None
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch)
        td.save(NEW, path, transfer_type=kind, chunk_bytes=65536)
        calls = list(recorder.calls)
    new = path.read_bytes()
    folder = os.stat(tmp_path).st_ino
    assert {kind for kind, _ in calls} >= {"write", "sync", "rename"}
    for stop in range(len(calls) + 1):
        for content in possible_states(calls[:stop], name, old, folder):
            assert content in (old, new), (
                f"after {stop} of {len(calls)} calls the file is neither the old nor the new one"
            )
    assert possible_states(calls, name, old, folder) == [new], "when save has returned, the new file is there for good"
    trial.write_bytes(new)
    assert torch.equal(td.load(trial)["a"], NEW["a"])


def test_the_model_finds_what_durable_false_risks(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    td.save(OLD, path)
    old = path.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch)
        td.save(NEW, path, durable=False, transfer_type="CPU_CACHED_GPU")
    states = possible_states(recorder.calls, "a.pt", old, os.stat(tmp_path).st_ino)
    assert b"" in states


@pytest.mark.parametrize("durable", [True, False])
def test_a_rotation_leaves_a_whole_checkpoint_at_every_moment(durable: bool, tmp_path: Path) -> None:
    """The manager keeps one: the old one may be gone only when the new one is certain."""
    with td.CheckpointManager(tmp_path, keep_last=1, durable=durable, transfer_type="CPU_CACHED_GPU") as manager:
        manager.save(1, OLD)
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch)
        with td.CheckpointManager(tmp_path, keep_last=1, durable=durable, transfer_type="CPU_CACHED_GPU") as manager:
            manager.save(2, NEW)
        calls = list(recorder.calls)
    old, new = (f"step-{step:08d}.pt" for step in (1, 2))
    content, folder = (tmp_path / new).read_bytes(), os.stat(tmp_path).st_ino
    assert ("unlink", old) in calls
    for stop in range(len(calls) + 1):
        done = calls[:stop]
        if ("unlink", old) in done:
            assert possible_states(done, new, None, folder) == [content], f"after {stop} of {len(calls)} calls"
