"""The typer application: one function per command."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from torchdirect.cli import doctor_view, files

__all__ = ["app", "run"]

app = typer.Typer(
    name="torchdirect",
    help="Save and load PyTorch checkpoints over the shortest path between storage and GPU memory.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    # A traceback that prints local variables could show tensors and secrets.
    pretty_exceptions_show_locals=False,
)

_INTERRUPTED = 130


def run(arguments: Sequence[str]) -> int:
    """Run the command line with these arguments, and return its exit status."""
    try:
        app(args=list(arguments), prog_name="torchdirect")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1 if end.code else 0
    return 0


def _show_version(wanted: bool) -> None:
    if wanted:
        import torchdirect

        print(f"torchdirect {torchdirect.__version__}")
        raise typer.Exit


@app.callback()
def _torchdirect(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    # With a callback typer keeps the name of a command even where there is only one.
    pass


# \b keeps the paragraph that follows it as it is.
@app.command(
    epilog="\b\nExit status: 0 if a direct path exists, 1 if not, 2 for wrong use, 130 after Ctrl-C.\n\n"
    "\b\nExamples:\n"
    "  torchdirect doctor                          the current directory\n"
    "  torchdirect doctor /data/checkpoints        where checkpoints are saved\n"
    "  torchdirect doctor ckpt.pt --json           for a bug report\n"
    "  torchdirect doctor /data >/dev/null && ...  only if GPUDirect Storage is real there"
)
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
    try:
        from torchdirect.doctor import diagnose

        report = diagnose("." if path is None else path)
    except FileNotFoundError as error:
        raise typer.BadParameter(str(error), param_hint="PATH") from None
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror or error}", param_hint="PATH") from None
    except KeyboardInterrupt:
        print("torchdirect: interrupted", file=sys.stderr)
        raise typer.Exit(_INTERRUPTED) from None
    if as_json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        doctor_view.show(report)
    raise typer.Exit(0 if report.direct else 1)


app.command(
    epilog="\b\nExit status: 0, 1 if the file cannot be read, 2 for wrong use.\n\n"
    "\b\nExamples:\n"
    "  torchdirect inspect ckpt.pt --sort bytes --limit 20\n"
    "  torchdirect inspect model.safetensors --filter '*.norm.*' --json"
)(files.inspect)
app.command(
    epilog="\b\nExit status: 0, 1 if it fails, 2 for wrong use.\n\n"
    "\b\nExamples:\n"
    "  torchdirect convert ckpt.pt model.safetensors --dtype bfloat16 --align\n"
    "  torchdirect convert model.safetensors shards/ --max-shard 5GB"
)(files.convert)
app.command(epilog="\b\nExit status: 0 if all that has a checksum is whole, 1 if not, 2 for wrong use.")(files.verify)
