"""How the doctor's report looks in a terminal: one screen, 100 columns, and plain text where there is no terminal."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchdirect.doctor import Level, Quality, Report, TransferVerdict

__all__ = ["render", "show"]

_WIDTH = 100
_LEVELS = {Level.OK: ("ok", "✓", "green"), Level.NOTE: ("note", "!", "yellow"), Level.PROBLEM: ("bad", "✗", "red")}
_ASCII = {"✓": "+", "✗": "x", "→": "->"}
_QUALITIES = {
    Quality.DIRECT: "bold green",
    Quality.COMPATIBILITY: "yellow",
    Quality.AVAILABLE: "green",
    Quality.UNAVAILABLE: "red",
}


def show(report: Report, console: Console | None = None) -> None:
    """Print a report to standard output."""
    if console is None:
        console = Console(highlight=False)
        # Without a terminal rich takes 80 columns, which would break lines that a log file need not have broken.
        console = Console(highlight=False, width=min(console.width, _WIDTH) if console.is_terminal else _WIDTH)
    console.print(render(report, ascii_only=not _unicode(console)))


def _unicode(console: Console) -> bool:
    return (console.encoding or "").lower().replace("-", "").startswith("utf")


def render(report: Report, *, ascii_only: bool = False) -> RenderableType:
    """Build what `show` prints."""

    def sign(symbol: str) -> str:
        return _ASCII.get(symbol, symbol) if ascii_only else symbol

    arrow = sign("→")
    return Group(
        _headline(report, sign), Text(), _transfers(report), Text(), _findings(report, sign, arrow), _end(report, arrow)
    )


def _headline(report: Report, sign: object) -> Text:
    assert callable(sign)
    text = Text("torchdirect doctor ", style="bold").append(report.path, style="bold cyan").append("\n")
    if report.direct:
        gpus = sorted({v.gpu for v in report.transfers if v.quality is Quality.DIRECT and v.gpu is not None})
        where = f" for GPU {', '.join(map(str, gpus))}" if gpus else ""
        return text.append(f"{sign('✓')} GPUDirect Storage is real here{where}", style="bold green")
    return text.append(f"{sign('✗')} No direct path between storage and GPU here", style="bold red")


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


def _transfers(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("transfer type", no_wrap=True)
    rows = _grouped(report)
    several = any(gpus for _, gpus in rows)
    if several:
        table.add_column("GPU", no_wrap=True)
    table.add_column("quality", no_wrap=True)
    table.add_column("why", ratio=1, overflow="fold")
    for row, gpus in rows:
        types = "\n".join(f"{int(v.transfer_type)} {v.transfer_type.name}" for v in row)
        quality = Text(row[0].quality.value, style=_QUALITIES[row[0].quality])
        table.add_row(types, *([_ranges(gpus)] if several else []), quality, row[0].reason)
    return table


def _findings(report: Report, sign: object, arrow: str) -> Table:
    assert callable(sign)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    for finding in report.findings:
        _, symbol, style = _LEVELS[finding.level]
        text = Text(finding.text)
        if finding.remedy and finding.level is not Level.OK:
            text.append(f"\n{arrow} {finding.remedy}", style="cyan")
        table.add_row(Text(sign(symbol), style=style), Text(finding.check, style=style), text)
    return table


def _end(report: Report, arrow: str) -> Text:
    blocked = next(
        (v for v in report.transfers if v.transfer_type.uses_cufile and v.quality is not Quality.DIRECT), None
    )
    if report.direct or blocked is None or not blocked.remedy:
        return Text()
    return Text("\nFirst step: ", style="bold").append(blocked.remedy)
