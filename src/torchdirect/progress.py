"""Progress of long transfers: a bar with rich on a terminal, plain lines elsewhere, or the caller's function."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from torchdirect.defaults import Progress
from torchdirect.engines.base import TransferState
from torchdirect.units import format_bytes

_PLAIN_EVERY_S = 2.0


@contextlib.contextmanager
def shown(progress: Progress, title: str, state: TransferState) -> Iterator[Callable[[], None] | None]:
    """Yield a function to call now and then while the transfer runs, or None if no progress is wanted."""
    if progress is False:
        yield None
        return
    if callable(progress):
        report = progress
        yield lambda: report(state.done, state.total)
        report(state.done, state.total)
        return
    with contextlib.ExitStack() as stack:
        tick = _rich_bar(stack, title, state) if sys.stderr.isatty() else None
        tick = tick or _plain_lines(title, state)
        yield tick
        tick()


def _rich_bar(stack: contextlib.ExitStack, title: str, state: TransferState) -> Callable[[], None] | None:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as Bar
    except ImportError:
        return None
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    bar = stack.enter_context(Bar(*columns, console=Console(stderr=True), transient=True))
    task = bar.add_task(title, total=None)
    return lambda: bar.update(task, completed=state.done, total=state.total or None)


def _plain_lines(title: str, state: TransferState) -> Callable[[], None]:
    start = last = time.monotonic()

    def tick() -> None:
        nonlocal last
        now = time.monotonic()
        finished = 0 < state.total <= state.done
        if now - last < _PLAIN_EVERY_S and not (finished and now - start >= _PLAIN_EVERY_S):
            return
        last = now
        rate = state.done / (now - start)
        print(
            f"{title}: {format_bytes(state.done)} of {format_bytes(state.total)}, {format_bytes(rate)}/s",
            file=sys.stderr,
        )

    return tick
