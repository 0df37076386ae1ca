"""The typer application: one function per command."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from torchdirect.cli import doctor, files

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
app.command(epilog=doctor.EPILOG)(doctor.doctor)
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


@app.command(
    "run",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog="\b\nExamples:\n  torchdirect run train.py --epochs 3\n  python -m torchdirect run train.py --epochs 3",
)
def run_script(
    context: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python program; what follows are its arguments.")],
) -> None:
    """Run a program whose torch.save and torch.load take torchdirect's road, without a change to it."""
    import os
    import runpy

    from torchdirect.patch import patch_torch

    if not os.path.isfile(script):
        raise typer.BadParameter(f"{script} is no file", param_hint="SCRIPT")
    sys.argv = [script, *context.args]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    with patch_torch():
        runpy.run_path(script, run_name="__main__")
