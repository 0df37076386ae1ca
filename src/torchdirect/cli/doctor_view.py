"""How the doctor's report looks in a terminal: one screen, 100 columns, and plain text where there is no terminal."""

from __future__ import annotations

import os
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchdirect.doctor import Level, Quality, Report, TransferVerdict

__all__ = ["render", "show"]

_WIDTH = 100
_LEVELS = {Level.OK: ("✓", "green"), Level.NOTE: ("!", "yellow"), Level.PROBLEM: ("✗", "red")}
_ASCII = {"✓": "+", "✗": "x", "→": "->"}
_QUALITIES = {
    Quality.DIRECT: "bold green",
    Quality.COMPATIBILITY: "yellow",
    Quality.AVAILABLE: "green",
    Quality.UNAVAILABLE: "red",
}
_Writer = Callable[[str], str]


def show(report: Report, console: Console | None = None) -> None:
    """Print a report to standard output, or to a console."""
    if console is None:
        console = Console(highlight=False)
        # Without a terminal rich takes 80 columns, which would break lines that a log file need not have broken.
        told = console.is_terminal or "COLUMNS" in os.environ
        console = Console(highlight=False, width=min(console.width, _WIDTH) if told else _WIDTH)
    if console.is_terminal:
        console.print(render(report, console.encoding))
        return
    with console.capture() as capture:
        console.print(render(report, console.encoding))
    # Tables pad their lines, which a file need not keep.
    console.file.write("".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()))


def _writer(encoding: str) -> _Writer:
    """Return a function that writes a text as an encoding can: signs as their stand-ins, others escaped."""

    def write(text: str) -> str:
        try:
            text.encode(encoding)
        except UnicodeEncodeError:
            text = "".join(_ASCII.get(character, character) for character in text)
            text = text.encode(encoding, "backslashreplace").decode(encoding)
        return text

    return write


def render(report: Report, encoding: str = "utf-8") -> RenderableType:
    """Build what `show` prints."""
    write = _writer(encoding)
    return Group(
        _headline(report, write),
        Text(),
        _transfers(report, write),
        Text(),
        _findings(report, write),
        _end(report, write),
    )


def _headline(report: Report, write: _Writer) -> Text:
    text = Text("torchdirect doctor ", style="bold").append(write(report.path), style="bold cyan").append("\n")
    if report.direct:
        gpus = sorted({v.gpu for v in report.transfers if v.quality is Quality.DIRECT and v.gpu is not None})
        where = f" for GPU {_ranges(gpus)}" if gpus else ""
        return text.append(write(f"✓ GPUDirect Storage is real here{where}"), style="bold green")
    return text.append(write("✗ No direct path between storage and GPU here"), style="bold red")


def _grouped(report: Report) -> list[tuple[list[TransferVerdict], list[int]]]:
    """Merge rows that say the same: types of one GPU, then GPUs."""
    by_gpu: dict[int | None, list[list[TransferVerdict]]] = {}
    for verdict in report.transfers:
        rows = by_gpu.setdefault(verdict.gpu, [])
        same = next((row for row in rows if _same(row[0], verdict)), None)
        if same is not None:
            same.append(verdict)
        else:
            rows.append([verdict])
    merged: list[tuple[list[TransferVerdict], list[int]]] = []
    for gpu, rows in by_gpu.items():
        for row in rows:
            twin = next((m for m in merged if _types(m[0]) == _types(row) and _same(m[0][0], row[0])), None)
            if twin is None:
                merged.append((row, [] if gpu is None else [gpu]))
            elif gpu is not None:
                twin[1].append(gpu)
    return merged


def _same(a: TransferVerdict, b: TransferVerdict) -> bool:
    return (a.quality, a.reason, a.remedy) == (b.quality, b.reason, b.remedy)


def _types(row: list[TransferVerdict]) -> list[int]:
    return [int(verdict.transfer_type) for verdict in row]


def _ranges(numbers: list[int]) -> str:
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


def _transfers(report: Report, write: _Writer) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("transfer type", no_wrap=True)
    rows = _grouped(report)
    several = any(gpus for _, gpus in rows)
    if several:
        table.add_column("GPU", no_wrap=True)
    table.add_column("quality", no_wrap=True)
    table.add_column("why", ratio=1, overflow="fold")
    for row, gpus in rows:
        types = Text("\n".join(f"{int(v.transfer_type)} {v.transfer_type.name}" for v in row))
        quality = Text(row[0].quality.value, style=_QUALITIES[row[0].quality])
        table.add_row(types, *([_ranges(gpus)] if several else []), quality, Text(write(row[0].reason)))
    return table


def _findings(report: Report, write: _Writer) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    for finding in report.findings:
        symbol, style = _LEVELS[finding.level]
        text = Text(write(finding.text))
        if finding.remedy:
            text.append(write(f"\n→ {finding.remedy}"), style="cyan")
        table.add_row(Text(write(symbol), style=style), Text(finding.check, style=style), text)
    return table


def _end(report: Report, write: _Writer) -> Text:
    blocked = next((v for v in report.transfers if v.transfer_type.uses_cufile), None)
    if report.direct or blocked is None or not blocked.remedy:
        return Text()
    return Text("\nFirst step: ", style="bold").append(write(blocked.remedy))
