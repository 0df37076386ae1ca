"""Where a setting comes from, and what it may be."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import torchdirect as td
from torchdirect import defaults
from torchdirect.transfer import TransferType


def test_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert defaults.current() == td.Settings()
    monkeypatch.setenv("TORCHDIRECT_NUM_THREADS", "3")
    monkeypatch.setenv("TORCHDIRECT_DURABLE", "off")
    assert (defaults.current().num_threads, defaults.current().durable) == (3, False)
    with td.settings(num_threads=4) as outer:
        assert (outer.num_threads, outer.durable) == (4, False)
        with td.settings(durable=True, fallback="WARN"):
            inner = defaults.current(num_threads=5, checksum=None)
            assert (inner.num_threads, inner.durable, inner.fallback, inner.checksum) == (5, True, "warn", True)
        assert defaults.current().durable is False
    assert defaults.current().num_threads == 3


def test_a_block_is_for_its_own_thread() -> None:
    seen: list[int | None] = []
    with td.settings(num_threads=7):
        thread = threading.Thread(target=lambda: seen.append(defaults.current().num_threads))
        thread.start()
        thread.join()
    assert seen == [None]


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("transfer_type", "cpu_async_gpu", TransferType.CPU_ASYNC_GPU),
        ("transfer_type", "0", TransferType.GDS),
        ("chunk_bytes", "8MiB", 8 << 20),
        ("chunk_bytes", "", None),
        ("num_threads", "auto", None),
        ("staging_bytes", "1g", 1 << 30),
        ("pin_memory", "yes", True),
        ("progress", "0", False),
        ("gds_compat", "Forbid", "forbid"),
        ("gds_backend", "kvikio", "kvikio"),
        ("staging", "Device", "device"),
        ("snapshot_bytes", "2g", 2 << 30),
        ("snapshot_bytes", "auto", None),
        ("pending", "refuse", "refuse"),
    ],
)
def test_values_from_the_environment(name: str, text: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"TORCHDIRECT_{name.upper()}", text)
    assert getattr(defaults.current(), name) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("transfer_type", "warp"), ("transfer_type", 7), ("transfer_type", -1), ("transfer_type", True),
        ("fallback", "maybe"), ("num_threads", 0), ("num_threads", 2000), ("num_threads", 1.5), ("num_threads", True),
        ("chunk_bytes", 5000), ("chunk_bytes", "2GiB"), ("chunk_bytes", -4096), ("staging_bytes", 4096),
        ("durable", "perhaps"), ("durable", 2), ("checksum", "x"), ("progress", 3), ("gds_compat", "deny"),
        ("gds_backend", "spdk"), ("staging", "disk"), ("snapshot_bytes", 10), ("pending", "queue"),
    ],
)  # fmt: skip
def test_bad_values_are_named(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(td.SettingsError, match=f"^{name}={value!r}: "):
        defaults.current(**{name: value})
    with pytest.raises(td.SettingsError, match=f"^{name}="), td.settings(**{name: value}):
        pass
    monkeypatch.setenv(f"TORCHDIRECT_{name.upper()}", f"bad {value}")
    with pytest.raises(td.SettingsError, match=f"environment variable TORCHDIRECT_{name.upper()}="):
        defaults.current()
    assert issubclass(td.SettingsError, ValueError)


def test_unknown_names() -> None:
    with pytest.raises(td.SettingsError, match=r"unknown setting 'threads'.*num_threads"), td.settings(threads=3):
        pass
