"""`CheckpointManager`: the checkpoints of a training run in one directory, and which of them are kept.

A checkpoint is complete when it is there under its name. A file gets its name by the last step of its publication; a
directory of `torch.distributed.checkpoint` is complete when its ``.metadata`` has its name. So there is no pointer that
could lead to the wrong one, and nothing to repair after a crash.
"""

from __future__ import annotations

import concurrent.futures
import errno
import logging
import os
import pickle
import re
import shutil
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchdirect import background, checkpoint, defaults, publish
from torchdirect.errors import CorruptCheckpointError, LoadError, SaveError, SavePendingError, SettingsError
from torchdirect.transfer import last_transfer

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger("torchdirect")

_NAME = re.compile(r"step-(\d+)(\.pt)?")
_DOOMED = re.compile(r"\.step-\d+\.deleted")
_TEMPORARY = re.compile(r"\.(step-\d+\.pt)\.[0-9a-f]{24}\..*")
_METADATA = ".metadata"


class BrokenCheckpointWarning(UserWarning):
    """A checkpoint could not be loaded and was passed over."""


class _Damaged(Exception):  # noqa: N818 - it reports no error, it leads to the checkpoint before
    """A checkpoint cannot be loaded, and another one may."""


class Restored(NamedTuple):
    """What `CheckpointManager.load_latest` has loaded.

    Attributes
    ----------
    step
        Of the checkpoint.
    state
        The object in it.
    path
        Its file or directory.
    """

    step: int
    state: Any
    path: str


@dataclass(frozen=True)
class _Entry:
    """One complete checkpoint in the directory, and when it became that, in nanoseconds."""

    step: int
    path: str
    is_directory: bool
    completed: int


def name_of(step: int, *, directory: bool = False) -> str:
    """Return the name of a step's file or directory."""
    if step < 0:
        raise ValueError(f"a step is 0 or more, not {step}")
    return f"step-{step:08d}{'' if directory else '.pt'}"


def _step_of(path: str) -> int:
    match = _NAME.fullmatch(os.path.basename(path))
    return -1 if match is None else int(match[1])


def to_delete(saved: list[int], keep_last: int | None, keep_every: int | None) -> list[int]:
    """Return the steps that go, given all complete ones from the one saved first to the one saved last.

    The last one is never among them.
    """
    if keep_last is None:
        return []
    kept = set(saved[-max(keep_last, 1) :])
    if keep_every is not None:
        kept |= {step for step in saved if step % keep_every == 0}
    return [step for step in saved if step not in kept]


class CheckpointManager:
    """Saves a run's checkpoints by step, keeps the ones it is told to keep, and finds the one to go on from.

    Saves go on in the background, one at a time. A checkpoint is deleted only when a newer one is complete and on
    stable storage; a save that fails deletes nothing.

    With ``torch.distributed`` initialised a checkpoint is a directory that all ranks write and read together, by `dcp`;
    every rank makes the same calls, and rank 0 deletes.

    Parameters
    ----------
    directory
        Where the checkpoints are; made if it does not exist. No other program may write there.
    keep_last
        How many of the checkpoints saved last are kept, 1 or more; None keeps all.
    keep_every
        Checkpoints whose step is a multiple of this are kept besides.
    distributed
        Whether checkpoints are directories of all ranks (True) or files (False; rank 0 alone writes them). None: what
        ``torch.distributed.is_initialized()`` says.
    in_background
        Whether `save` returns when the snapshot is taken (see `save_async`), or when the checkpoint is complete.
    process_group
        The ranks, if not all. The manager makes a Gloo group of its own of them, since saves in the background must not
        mix with the collectives of the training: so all ranks make the manager together.
    settings
        ``transfer_type``, ``staging``, ``durable``, … for every save.

    Examples
    --------
    >>> manager = torchdirect.CheckpointManager("checkpoints", keep_last=3)
    >>> found = manager.load_latest(map_location="cuda")
    >>> first = 0 if found is None else found.step + 1
    >>> for step in range(first, 10_000):
    ...     train(step)
    ...     if step % 100 == 99:
    ...         manager.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    >>> manager.wait()
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep_last: int | None = 3,
        keep_every: int | None = None,
        distributed: bool | None = None,
        in_background: bool = True,
        process_group: torch.distributed.ProcessGroup | None = None,
        **settings: Any,
    ) -> None:
        for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise SettingsError(f"{name}={value!r}: use a number of 1 or more, or None")
        available = torch.distributed.is_available() and torch.distributed.is_initialized()
        if distributed and not available:
            raise SettingsError(
                "CheckpointManager(distributed=True) needs a process group: call torch.distributed.init_process_group "
                "first"
            )
        with defaults.settings(**settings) as parsed:  # tells of a bad name or value now, not at the first save
            self._pending_policy = parsed.pending
        self.directory = os.fspath(directory)
        self.keep_last, self.keep_every = keep_last, keep_every
        self.distributed = available if distributed is None else distributed
        self.in_background = in_background
        self._rank = torch.distributed.get_rank(process_group) if available else 0
        self._group = _own_group(process_group) if self.distributed else None
        self._settings = settings
        self._pending: concurrent.futures.Future[Any] | None = None
        self._deleting: concurrent.futures.Future[None] | None = None
        self._order: list[int] = []  # of the steps that this manager has saved
        self._broken: set[str] = set()
        self._lock = threading.Lock()
        os.makedirs(self.directory, exist_ok=True)

    # ------------------------------------------------------------------------------------------------- what there is

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, ascending. One that is damaged counts."""
        return sorted(self._entries())

    def latest(self) -> int | None:
        """Return the highest step that has a complete checkpoint; None if there is none."""
        return max(self._entries(), default=None)

    def path(self, step: int) -> str:
        """Return the file or directory of a step's complete checkpoint.

        Raises
        ------
        FileNotFoundError
            If there is none.
        """
        entry = self._entries().get(step)
        if entry is None:
            there = ", ".join(map(str, self.steps())) or "none"
            raise FileNotFoundError(
                errno.ENOENT, f"no complete checkpoint of step {step} (there are: {there})", self.directory
            )
        return entry.path

    def _entries(self) -> dict[int, _Entry]:
        found: dict[int, _Entry] = {}
        for name in os.listdir(self.directory):
            entry = self._entry(name)
            if entry is not None:
                known = found.get(entry.step)
                if known is None or entry.completed > known.completed:  # a file and a directory of the same step
                    found[entry.step] = entry
        return found

    def _entry(self, name: str) -> _Entry | None:
        """Return the complete checkpoint that has a name; None if it is something else, or incomplete."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        path = os.path.join(self.directory, name)
        is_directory = match[2] is None
        try:
            status = os.stat(os.path.join(path, _METADATA) if is_directory else path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return _Entry(int(match[1]), path, is_directory, status.st_mtime_ns)

    # ------------------------------------------------------------------------------------------------------- saving

    def save(self, step: int, obj: Any) -> concurrent.futures.Future[Any]:
        """Save a checkpoint; return its future.

        An earlier save of this manager that has not ended is waited for (with the setting ``pending="refuse"``:
        `SavePendingError`). If it failed, its error is raised here, once, and nothing is saved.

        Parameters
        ----------
        step
            Its number, 0 or more. A checkpoint of the same step is replaced when the new one is complete.
        obj
            As for `save`; for directories a (nested) dict as for `dcp.save`.

        Returns
        -------
        Future
            Done when the checkpoint is complete; for files a `PendingSave`. On ranks that write nothing it is done, and
            with ``in_background=False``.

        Raises
        ------
        SaveError, …
            As `save_async`; with ``in_background=False`` as `save`.
        """
        name_of(step)  # a bad number is told before anything is waited for
        self._settle()
        path = os.path.join(self.directory, name_of(step, directory=self.distributed))
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        if self.distributed or self._rank == 0:
            with defaults.settings(**self._settings):
                if self.in_background:
                    future = self._save_behind(obj, path)
                else:
                    future.set_result(self._save_now(obj, path))
            if self._rank == 0:
                self._then_prune(step, path, future)
        else:
            future.set_result(None)
        self._pending = future
        if not self.in_background:
            self.wait()
        return future

    def _save_behind(self, obj: Any, path: str) -> concurrent.futures.Future[Any]:
        if not self.distributed:
            return background.save_async(obj, path)
        from torchdirect import dcp

        future: concurrent.futures.Future[Any] = dcp.async_save(obj, path, process_group=self._group)
        return future

    def _save_now(self, obj: Any, path: str) -> Any:
        """Save without a copy; return what the future of the same save in the background would."""
        if not self.distributed:
            checkpoint.save(obj, path)
            return last_transfer()
        from torchdirect import dcp

        return dcp.save(obj, path, process_group=self._group)

    def _settle(self) -> None:
        if self._pending is not None and not self._pending.done() and self._pending_policy == "refuse":
            raise SavePendingError(
                f"{self.directory}: the save before has not ended. Call wait(), or use pending='wait'.",
                errno.EBUSY,
                self.directory,
            )
        self.wait()

    def wait(self) -> None:
        """Wait until no save is pending, and what it replaces is deleted.

        Raises
        ------
        SaveError, …
            What the pending save has failed with.
        """
        pending, self._pending = self._pending, None
        try:
            if pending is not None:
                pending.result()
        except BaseException as exc:
            failed = _first_failure(exc)
            if failed is exc:
                raise
            message = f"{self.directory}: saving a checkpoint of all ranks: {type(failed).__name__}: {failed}"
            raise SaveError(message, getattr(failed, "errno", None), self.directory) from exc
        finally:
            if self._deleting is not None:
                concurrent.futures.wait([self._deleting])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait; an error of the pending save does not hide the one that ends the block."""
        try:
            self.wait()
        except Exception as exc:
            if value is None:
                raise
            logger.error("%s: the last save failed: %s", self.directory, exc)

    def _then_prune(self, step: int, path: str, future: concurrent.futures.Future[Any]) -> None:
        """Delete what is no longer kept when a save has succeeded, in the thread that ends it."""
        deleting: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._deleting = deleting

        def ended(done: concurrent.futures.Future[Any]) -> None:
            try:
                # PendingSave.exception would count as asking.
                if concurrent.futures.Future.exception(done) is None:
                    self._prune(step, path)
            except Exception as exc:  # the checkpoint is complete: that old ones stay is no failure of it
                logger.warning("%s: old checkpoints were not deleted: %s", self.directory, exc)
            finally:
                deleting.set_result(None)

        future.add_done_callback(ended)

    def _prune(self, step: int, path: str) -> None:
        with self._lock:
            self._order = [*(s for s in self._order if s != step), step]
            entries = self._entries()
            if step not in entries or entries[step].path != path:
                return
            self._broken = {old for old in self._broken if _step_of(old) != step}
            saved = [s for s in sorted(entries) if s not in self._order and entries[s].path not in self._broken]
            saved += [s for s in self._order if s in entries]
            doomed = [entries[s].path for s in to_delete(saved, self.keep_last, self.keep_every)]
            doomed += self._leftovers(entries)
            if doomed:
                make_durable(path)
            for old in doomed:
                self._delete(old)

    def _leftovers(self, entries: dict[int, _Entry]) -> list[str]:
        """Return what deletions and saves that died have left."""
        kept = {entry.path for entry in entries.values()} | self._broken
        found = []
        for name in os.listdir(self.directory):
            path = os.path.join(self.directory, name)
            match = _NAME.fullmatch(name)
            if _DOOMED.fullmatch(name) or (match is not None and path not in kept):
                found.append(path)
            elif match := _TEMPORARY.fullmatch(name):
                found += publish.stale_temporaries(os.path.join(self.directory, match[1]))
        return list(dict.fromkeys(found))

    def _delete(self, path: str) -> None:
        """Delete a file, or a directory in two steps: first its name goes, so that no half of it counts."""
        try:
            if not os.path.isdir(path):
                os.unlink(path)
                return
            name = os.path.basename(path)
            if not _DOOMED.fullmatch(name):
                hidden = os.path.join(self.directory, f".{name}.deleted")
                if os.path.isdir(hidden):
                    shutil.rmtree(hidden)
                os.rename(path, hidden)
                path = hidden
            shutil.rmtree(path)
        except FileNotFoundError:
            pass
        except OSError as exc:
            logger.warning("%s: an old checkpoint could not be deleted: %s", path, exc)

    # ------------------------------------------------------------------------------------------------------ loading

    def load_latest(self, state: Any = None, **load_arguments: Any) -> Restored | None:
        """Load the checkpoint of the highest step that is whole; None if there are no checkpoints.

        One that is damaged is passed over with a `BrokenCheckpointWarning` that names it, and the one before is taken.

        Parameters
        ----------
        state
            For directories: the (nested) dict that they are loaded into, as for ``torch.distributed.checkpoint.load``.
        load_arguments
            For files: ``map_location`` and whatever else `load` takes; for directories what `dcp.load` takes.
            ``verify`` is True unless given.

        Raises
        ------
        CorruptCheckpointError
            If there are checkpoints, and none of them is whole: a run must not begin anew without anyone noticing.
        pickle.UnpicklingError
            If ``weights_only`` forbids what a whole file holds.
        """
        self._settle_quietly()
        broken: list[str] = []
        for entry in self._from_rank_0(lambda: sorted(self._entries().values(), key=lambda e: -e.step)):
            try:
                loaded = self._load(entry, state, load_arguments)
            except _Damaged as exc:
                self._broken.add(entry.path)
                broken.append(f"{entry.path} ({exc})")
                warnings.warn(
                    f"passed over a checkpoint that cannot be loaded: {broken[-1]}",
                    BrokenCheckpointWarning,
                    stacklevel=2,
                )
                continue
            return Restored(entry.step, loaded, entry.path)
        if broken:
            raise CorruptCheckpointError(
                f"{self.directory}: none of its {len(broken)} checkpoints can be loaded: {'; '.join(broken)}. "
                "Take an intact copy, or begin in another directory"
            )
        return None

    def _settle_quietly(self) -> None:
        """Wait for a pending save; what it failed with is raised by `save` or `wait`, not by a load."""
        if self._pending is not None:
            concurrent.futures.wait([self._pending])
        if self._deleting is not None:
            concurrent.futures.wait([self._deleting])

    def _load(self, entry: _Entry, state: Any, load_arguments: dict[str, Any]) -> Any:
        """Load one checkpoint; raise `_Damaged` on all ranks that load it together, if it is on one of them."""
        loaded: Any = None
        error: BaseException | None = None
        damage = ""
        try:
            loaded = self._load_here(entry, state, load_arguments)
        except BaseException as exc:
            failed = _first_failure(exc)
            if not isinstance(failed, Exception):
                raise
            error = exc
            if _is_damage(failed):
                damage = f"{type(failed).__name__}: {failed}"
        outcomes: list[Any] = [(damage, error is not None)]
        if self.distributed:
            outcomes *= torch.distributed.get_world_size(self._group)
            torch.distributed.all_gather_object(outcomes, outcomes[self._rank], group=self._group)
        if error is not None and not damage:
            raise error
        if any(failed and not found for found, failed in outcomes):
            raise LoadError(
                f"{entry.path}: another rank could not load it; its own error says why", filename=entry.path
            )
        for found, _ in outcomes:
            if found:
                raise _Damaged(found) from error
        return loaded

    def _load_here(self, entry: _Entry, state: Any, load_arguments: dict[str, Any]) -> Any:
        if not entry.is_directory:
            if state is not None:
                raise TypeError(
                    f"{entry.path} is a file: load_latest returns its object, and loads nothing into `state`. "
                    "Leave `state` out"
                )
            return checkpoint.load(entry.path, **{"verify": True, **load_arguments})
        if state is None:
            raise TypeError(
                f"{entry.path} is a directory, which is loaded into an existing (nested) dict: give it as `state`"
            )
        from torchdirect import dcp

        dcp.load(state, entry.path, process_group=self._group, **{"verify": True, **load_arguments})
        return state

    # -------------------------------------------------------------------------------------------------- many ranks

    def _from_rank_0(self, work: Callable[[], Any]) -> Any:
        """Return what `work` returns on rank 0, or raise what it raises there, on all ranks."""
        if not self.distributed:
            return work()
        outcome: list[Any] = [None, None]
        if self._rank == 0:
            try:
                outcome[0] = work()
            except Exception as exc:  # the others wait for this rank, so they are told first
                outcome[1] = exc
        torch.distributed.broadcast_object_list(outcome, group=self._group, group_src=0)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]


def _own_group(group: torch.distributed.ProcessGroup | None) -> torch.distributed.ProcessGroup:
    """Return a new Gloo group of the same ranks."""
    if group is None:
        made = torch.distributed.new_group(backend="gloo")
    else:
        ranks = torch.distributed.get_process_group_ranks(group)
        made = torch.distributed.new_group(ranks, backend="gloo", use_local_synchronization=True)
    assert isinstance(made, torch.distributed.ProcessGroup)  # and not a mark for ranks outside
    return made


def _first_failure(error: BaseException) -> BaseException:
    """Return what is behind an error: for a `CheckpointException` (no `Exception`) what one of the ranks ran into."""
    failures = getattr(error, "failures", None)
    if not isinstance(failures, dict) or not failures:
        return error
    found: list[BaseException] = [failure[0] for failure in failures.values()]
    return next((failure for failure in found if not _is_damage(failure)), found[0])


def _is_damage(error: BaseException) -> bool:
    """Tell a damaged checkpoint from a mistake of the caller, which no older checkpoint would mend."""
    if isinstance(error, (CorruptCheckpointError, LoadError, EOFError, FileNotFoundError)):
        return True
    # The same class tells that `weights_only` forbids what is in a whole file.
    return isinstance(error, pickle.UnpicklingError) and "not a PyTorch checkpoint" in str(error)


def make_durable(path: str) -> None:
    """Bring a checkpoint and its name to stable storage: the files, then the directories that name them."""
    if os.path.isdir(path):
        for folder, _, names in os.walk(path):
            for name in names:
                _sync(os.path.join(folder, name))
            _sync(folder)
    else:
        _sync(path)
    _sync(os.path.dirname(path) or ".")


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
