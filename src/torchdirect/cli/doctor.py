"""The command that tells what this machine offers."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated

import typer

import torchdirect.doctor
from torchdirect.cli import doctor_view
from torchdirect.doctor import Report

EPILOG = (
    # \b keeps the paragraph that follows it as it is.
    "\b\nExit status: 0 if a direct path exists, 1 if not, 2 for wrong use, 130 after Ctrl-C.\n\n"
    "\b\nExamples:\n"
    "  torchdirect doctor                          the current directory\n"
    "  torchdirect doctor /data/checkpoints        where checkpoints are saved\n"
    "  torchdirect doctor ckpt.pt --json           for a bug report\n"
    "  torchdirect doctor /data >/dev/null && ...  only if GPUDirect Storage is real there"
)

_INTERRUPTED = 130


def doctor(
    path: Annotated[
        str | None,
        typer.Argument(help="File or directory to look at.", metavar="PATH", show_default="the current directory"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON, with nothing in it that is secret.")] = False,
) -> None:
    """Tell which transfer types work for PATH on this machine, and what is in the way of the others.

    Needs no root. Writes nothing but one temporary file beside PATH, and removes it.
    """
    named = "." if path is None else path
    try:
        with _tidy_end():
            report = torchdirect.doctor.diagnose(named)
    except OSError as error:
        raise typer.BadParameter(f"{named!r}: {error.strerror or error}", param_hint="PATH") from None
    except KeyboardInterrupt:
        print("torchdirect: interrupted", file=sys.stderr)
        raise typer.Exit(_INTERRUPTED) from None
    if sys.stdout is not None:
        _write(report, as_json)
    raise typer.Exit(0 if report.direct else 1)


def _write(report: Report, as_json: bool) -> None:
    try:
        if as_json:
            print(json.dumps(report.to_json(), indent=2))
        else:
            doctor_view.show(report)
        # Here rather than at the end of the interpreter, which can only say that something was lost.
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        print(f"torchdirect: the report could not be written: {error.strerror or error}", file=sys.stderr)
        # Or the interpreter would try once more to write what is buffered.
        sys.stdout = None
        raise typer.Exit(1) from None


@contextmanager
def _tidy_end() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack, as Ctrl-C does, so that no temporary file stays behind."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
