"""The commands that look at checkpoint files and convert them."""

from __future__ import annotations

import fnmatch
import json
import os
import sys
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from torchdirect.tensor_file import TensorFile, TensorInfo
from torchdirect.units import format_bytes

_SORTS = {
    "file": lambda info: info.file_offset,
    "name": lambda info: info.name,
    "bytes": lambda info: -info.nbytes,
    "dtype": lambda info: (str(info.dtype), info.name),
}


_INTERRUPTED = 130


def _fail(error: BaseException) -> typer.Exit:
    interrupted = isinstance(error, KeyboardInterrupt)
    print(f"torchdirect: {'interrupted' if interrupted else error}", file=sys.stderr)
    return typer.Exit(_INTERRUPTED if interrupted else 1)


def _alignment(offset: int) -> int:
    """Return the largest power of two, 4096 at most, that divides an offset."""
    return min(offset & -offset, 4096) if offset else 4096


def _as_json(file: TensorFile, shown: list[TensorInfo]) -> dict[str, Any]:
    return {
        "path": file.path,
        "format": file.format,
        "file_bytes": file.size,
        "metadata": file.metadata,
        "imports": list(file.imports),
        "not_plain": list(file.opaque),
        "tensors": [
            {
                "name": info.name,
                "dtype": str(info.dtype).removeprefix("torch."),
                "shape": list(info.shape),
                "stride": list(info.stride),
                "nbytes": info.nbytes,
                "file_offset": info.file_offset,
                "alignment": _alignment(info.file_offset),
            }
            for info in shown
        ],
    }


def inspect(
    path: Annotated[str, typer.Argument(metavar="FILE", help="A torch or safetensors file.")],
    sort: Annotated[str, typer.Option(help="Order: file, name, bytes or dtype.")] = "file",
    pattern: Annotated[str, typer.Option("--filter", help="Only names that match, such as '*.weight'.")] = "*",
    limit: Annotated[int, typer.Option(min=0, help="At most so many tensors; 0 shows all.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """Show the tensors of a checkpoint file; nothing of it is executed, and no payload is read."""
    if sort not in _SORTS:
        raise typer.BadParameter(f"use one of {', '.join(_SORTS)}", param_hint="--sort")
    try:
        file = TensorFile(path)
    except (OSError, RuntimeError, EOFError, ImportError, KeyboardInterrupt) as error:
        raise _fail(error) from None
    file.close()
    chosen = sorted((i for i in file.tensors.values() if fnmatch.fnmatch(i.name, pattern)), key=_SORTS[sort])
    shown = chosen[:limit] if limit else chosen
    if as_json:
        print(json.dumps(_as_json(file, shown), indent=2))
        return
    console = Console()
    total = sum(info.nbytes for info in {info.place: info for info in file.tensors.values()}.values())
    console.print(
        f"{path}: {file.format} file of {format_bytes(file.size)}; {len(file.tensors)} tensors, {format_bytes(total)}",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
    for key, value in file.metadata.items():
        console.print(f"  {key}: {value}", markup=False, highlight=False)
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "dtype", "shape"):
        table.add_column(heading, overflow="fold")
    for heading in ("bytes", "offset", "alignment"):
        table.add_column(heading, justify="right")
    for info in shown:
        table.add_row(
            info.name, str(info.dtype).removeprefix("torch."), " x ".join(map(str, info.shape)) or "scalar",
            format_bytes(info.nbytes), str(info.file_offset), str(_alignment(info.file_offset)),
        )  # fmt: skip
    console.print(table, markup=False, highlight=False)
    if len(shown) < len(chosen):
        console.print(f"… and {len(chosen) - len(shown)} more (--limit 0 shows all)", markup=False, highlight=False)
    if file.opaque:
        console.print(f"only unpickling can rebuild: {', '.join(file.opaque)}", markup=False, highlight=False)
    if file.imports:
        console.print(f"unpickling would import: {', '.join(file.imports)}", markup=False, highlight=False)


def convert(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="A torch or safetensors file, or a directory of shards.")
    ],
    destination: Annotated[
        str, typer.Argument(metavar="DST", help="A .safetensors file, a torch file, or a directory with --max-shard.")
    ],
    dtype: Annotated[str | None, typer.Option(help="What floating-point tensors become, such as bfloat16.")] = None,
    align: Annotated[bool, typer.Option("--align", help="Begin safetensors data on a multiple of 4096 bytes.")] = False,
    max_shard: Annotated[str | None, typer.Option(help="Write shards of this size, such as 5GB, and an index.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace DST if it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write what was done as JSON.")] = False,
) -> None:
    """Convert a checkpoint between torch and safetensors files, in bounded memory. Only tensors are carried over."""
    wanted = getattr(torch, dtype, None) if dtype is not None else None
    if dtype is not None and not (isinstance(wanted, torch.dtype) and wanted.is_floating_point):
        raise typer.BadParameter(f"{dtype!r} is no floating-point dtype of PyTorch", param_hint="--dtype")
    if os.path.exists(destination) and not force and not (max_shard and os.path.isdir(destination)):
        raise typer.BadParameter(f"{destination} exists; use --force to replace it", param_hint="DST")
    from torchdirect.conversion import convert as run

    try:
        done = run(
            source, destination, dtype=wanted, align=align, max_shard_bytes=max_shard, progress=sys.stderr.isatty()
        )
    except (OSError, RuntimeError, ValueError, EOFError, ImportError, KeyboardInterrupt) as error:
        raise _fail(error) from None
    if as_json:
        result = {
            "files": list(done.files), "tensors": done.tensors, "nbytes": done.nbytes,
            "left_out": done.left_out, "seconds": done.seconds,
        }  # fmt: skip
        print(json.dumps(result, indent=2))
        return
    print(f"{done.tensors} tensors, {format_bytes(done.nbytes)}, in {done.seconds:.2f} s: {', '.join(done.files)}")
    for name, kept in done.left_out.items():
        print(f"  {name} is {kept}")


def verify(
    path: Annotated[
        str,
        typer.Argument(
            metavar="FILE|DIR", help="A torch or safetensors file, a directory of shards, or a distributed checkpoint."
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """Check every checksum that a checkpoint carries; nothing of it is executed."""
    from torchdirect.verification import verify as run

    try:
        found = run(path, progress=sys.stderr.isatty() and not as_json)
    except (OSError, RuntimeError, EOFError, ImportError, KeyboardInterrupt) as error:
        if as_json and not isinstance(error, KeyboardInterrupt):
            print(json.dumps({"whole": False, "error": str(error)}, indent=2))
        raise _fail(error) from None
    if as_json:
        result = {
            "whole": True, "files": list(found.files), "records": found.records, "nbytes": found.nbytes,
            "unchecked": list(found.unchecked), "seconds": found.seconds,
        }  # fmt: skip
        print(json.dumps(result, indent=2))
        return
    print(found)
    for name in found.unchecked[:10]:
        print(f"  no checksum: {name}")
