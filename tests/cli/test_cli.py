"""The command line: exit codes, output with and without a terminal, missing extras."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

import rich.console

import torchdirect
from torchdirect import doctor
from torchdirect.cli import doctor_view
from torchdirect.cli.main import main
from torchdirect.doctor import Finding, Level, Quality, Report, TransferVerdict
from torchdirect.transfer import TransferType


def report(quality: Quality = Quality.COMPATIBILITY, gpus: int = 8) -> Report:
    verdicts = tuple(
        TransferVerdict(t, gpu, quality if t.uses_cufile else Quality.AVAILABLE, "because " * 12, "do this")
        for gpu in range(gpus)
        for t in sorted(set(TransferType) - {TransferType.AUTO})
    )
    problem = Finding("udev", Level.PROBLEM, "no record " * 15, "mount it " * 12)
    return Report("/data", "0", {}, (Finding("gpu", Level.OK, "8 x GPU"), problem), verdicts)


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Any:
    def answer(value: Any) -> None:
        def diagnose(path: Any) -> Report:
            if isinstance(value, BaseException):
                raise value
            assert isinstance(value, Report)
            return value

        monkeypatch.setattr(doctor, "diagnose", diagnose)

    return answer


@pytest.mark.parametrize(
    ("quality", "code"), [(Quality.DIRECT, 0), (Quality.COMPATIBILITY, 1), (Quality.UNAVAILABLE, 1)]
)
def test_exit_status(answer: Any, capsys: pytest.CaptureFixture[str], quality: Quality, code: int) -> None:
    answer(report(quality))
    assert main(["doctor", "/data"]) == code
    assert quality.value in capsys.readouterr().out
    assert main(["doctor", "/data", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["direct"] is (code == 0)


def test_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path / "a" / "b")]) == 2
    error = capsys.readouterr().err
    assert "neither it nor its directory exists" in " ".join(error.replace("│", " ").split())
    assert main(["doctor", "--nonsense"]) == 2
    assert main(["nonsense"]) == 2


@pytest.mark.parametrize("path", ["", "/dev/null", "/etc/passwd/below"])
def test_paths_that_are_no_place_for_a_file(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", path]) == 2
    assert repr(path) in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_unwind(answer: Any, monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_DFL)
    tidied = []

    def diagnose(path: Any) -> Report:
        try:
            signal.raise_signal(number)
        finally:
            tidied.append(path)
        raise AssertionError("not reached")

    monkeypatch.setattr(doctor, "diagnose", diagnose)
    try:
        assert main(["doctor"]) == 128 + number and tidied == ["."]
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_output_that_cannot_be_written(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    answer(report(Quality.DIRECT))
    for option in ([], ["--json"]):
        errors = io.StringIO()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", Full())
            patch.setattr(sys, "stderr", errors)
            assert main(["doctor", *option]) == 1
        assert errors.getvalue() == "torchdirect: the report could not be written: No space left on device\n"
    with monkeypatch.context() as patch:
        # As the shell's ">&-" leaves it.
        patch.setattr(sys, "stdout", None)
        assert main(["doctor"]) == main(["doctor", "--json"]) == 0


def test_interrupt(answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    answer(KeyboardInterrupt())
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "torchdirect: interrupted\n"


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"torchdirect {torchdirect.__version__}\n"
    assert main(["doctor", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "0 if a direct path exists, 1 if not, 2 for wrong use" in text and "torchdirect doctor ckpt.pt --json" in text
    )


def test_missing_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delitem(sys.modules, "torchdirect.cli.app", raising=False)
    monkeypatch.setitem(sys.modules, "typer", None)
    assert main(["doctor"]) == 2
    assert "pip install 'torchdirect[cli]'" in capsys.readouterr().err


@pytest.mark.parametrize("width", [60, 100])
def test_text_keeps_to_its_width(width: int) -> None:
    file = io.StringIO()
    doctor_view.show(report(), rich.console.Console(file=file, width=width))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= width and len(lines) < 50
    assert "0-7" in file.getvalue() and "First step: do this" in file.getvalue()


def test_text_without_unicode() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    doctor_view.show(replace(report(), path="/größe"), rich.console.Console(file=file, width=100))
    file.flush()
    assert b"x  udev" in raw.getvalue() and b"-> mount it" in raw.getvalue() and rb"gr\xf6\xdfe" in raw.getvalue()


def test_text_is_no_markup() -> None:
    file = io.StringIO()
    odd = replace(report().transfers[0], reason="[/nope] [red]x", remedy="[b]y")
    finding = Finding("disk", Level.PROBLEM, "[/disk]", "[/remedy]")
    doctor_view.show(
        replace(report(), path="/[/x]", transfers=(odd,), findings=(finding,)),
        rich.console.Console(file=file, width=90),
    )
    for text in ("/[/x]", "[/nope] [red]x", "[b]y", "[/disk]", "[/remedy]"):
        assert text in file.getvalue()


def test_width_of_a_pipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for columns, most in (("60", 60), (None, 100)):
        if columns is None:
            monkeypatch.delenv("COLUMNS")
        else:
            monkeypatch.setenv("COLUMNS", columns)
        doctor_view.show(report())
        lines = capsys.readouterr().out.splitlines()
        assert most - 15 < max(map(len, lines)) <= most and all(line == line.rstrip() for line in lines)


def test_color_only_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(**options: Any) -> str:
        file = io.StringIO()
        doctor_view.show(report(), rich.console.Console(file=file, width=100, **options))
        return file.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[31m" in shown(force_terminal=True, color_system="standard")
    assert "\x1b" not in shown()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[31m" not in shown(force_terminal=True, color_system="standard")


def test_the_package_itself_needs_no_command_line() -> None:
    program = "import sys, torchdirect, torchdirect.doctor; print({'typer', 'rich', 'click'} & set(sys.modules))"
    environment = dict(os.environ, PYTHONPATH=str(Path(torchdirect.__file__).parents[1]))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "set()\n"


def test_the_command_is_declared() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '[project.scripts]\ntorchdirect = "torchdirect.cli.main:main"\n' in text


def test_as_a_program(tmp_path: Path) -> None:
    environment = dict(os.environ, PYTHONPATH=str(Path(torchdirect.__file__).parents[1]), NO_COLOR="1")
    command = [sys.executable, "-m", "torchdirect", "doctor", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr + done.stdout and not done.stderr
    assert "CPU_CACHED_GPU" in done.stdout and "\x1b" not in done.stdout
    assert os.listdir(tmp_path) == []
