"""Short-lived child processes: what may abort, hang or take the process down is tried in one of them first.

A child whose driver call is stuck in the kernel cannot even be killed, so nothing here waits without a bound.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Ended", "python", "run"]

_GRACE = 2.0

# No core file, and an end of its own should this process be killed while it waits.
_PRELUDE = """
import resource, signal
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
signal.alarm({seconds})
"""


@dataclass(frozen=True)
class Ended:
    """How a child ended: `returncode` as `subprocess` gives it, or None if it did not end in time and was killed."""

    returncode: int | None
    stdout: bytes
    stderr: bytes = b""
    logged: str = ""


def run(
    command: Sequence[str],
    timeout: float,
    *,
    environment: Mapping[str, str] | None = None,
    folder: str | None = None,
    pass_fds: Sequence[int] = (),
) -> Ended:
    """Run a command without input, and wait for it no longer than `timeout` seconds and a short grace.

    Raises
    ------
    OSError
        If it cannot be started.
    """
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
        cwd=folder, pass_fds=pass_fds,
    )  # fmt: skip
    try:
        stdout, stderr = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        stdout, stderr = _kill(child)
        return Ended(None, stdout, stderr)
    except BaseException:
        _kill(child)
        raise
    return Ended(child.returncode, stdout, stderr)


def _kill(child: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    child.kill()
    try:
        return child.communicate(timeout=_GRACE)
    except subprocess.TimeoutExpired as late:
        # It is stuck in the kernel, or a grandchild holds the pipes: whoever it is must be left behind.
        for pipe in (child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()
        return late.stdout or b"", late.stderr or b""


def python(
    program: str,
    arguments: Sequence[str],
    timeout: float,
    *,
    environment: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> Ended:
    """Run a Python program that uses libcufile, in a temporary folder; `Ended.logged` tells the first error it logged.

    Raises
    ------
    OSError
        If it cannot be started: also if there is no interpreter, as in a frozen program, or no temporary folder.
    """
    if not sys.executable or getattr(sys, "frozen", False):
        raise OSError("there is no Python interpreter to start")
    with tempfile.TemporaryDirectory(prefix="cufile-trial-", ignore_cleanup_errors=True) as folder:
        # Some releases write cufile.log into the working directory whatever they are told.
        log = os.path.join(folder, "cufile.log")
        variables = dict(os.environ, CUFILE_LOGFILE_PATH=log, **(environment or {}))
        config = variables.get("CUFILE_ENV_PATH_JSON")
        if config:
            variables["CUFILE_ENV_PATH_JSON"] = os.path.abspath(config)
        text = _PRELUDE.format(seconds=int(timeout) + 5) + program
        command = [sys.executable, "-I", "-S", "-c", text, *arguments]
        ended = run(command, timeout, environment=variables, folder=folder, pass_fds=pass_fds)
        return Ended(ended.returncode, ended.stdout, ended.stderr, _first_error(log))


def _first_error(log: str) -> str:
    try:
        with open(log, errors="replace") as lines:
            # The first error is the cause; later ones only pass it on.
            return next((line.split("ERROR", 1)[1].strip()[:200] for line in lines if "ERROR" in line), "")
    except OSError:
        return ""
