"""Entry point of the command ``torchdirect``: makes messages and exit codes of missing extras and Ctrl-C."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]

_INTERRUPTED = 130
_BAD_USE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments : sequence of str, optional
        What follows the program's name; that of this process by default.

    Returns
    -------
    int
        Exit status: 0 and 1 as the command says, 2 for wrong use or a missing extra, 130 after Ctrl-C.
    """
    try:
        from torchdirect.cli.app import run
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "rich", "click"):
            raise
        print(
            f"torchdirect: the command line needs {error.name}, which is not installed. "
            "Run: pip install 'torchdirect[cli]'",
            file=sys.stderr,
        )
        return _BAD_USE
    try:
        return run(list(arguments) if arguments is not None else sys.argv[1:])
    except KeyboardInterrupt:
        print("torchdirect: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has gone: nothing is left to say, also not by the interpreter's own last flush.
        sys.stdout = None
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
