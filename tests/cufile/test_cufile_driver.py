from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from cufile_double import CuFileDouble
from torchdirect.cufile import driver, library, structs
from torchdirect.cufile.errors import CuFileError, CuFileUnavailableError


@pytest.fixture
def probing(cufile_double: CuFileDouble, monkeypatch: pytest.MonkeyPatch) -> CuFileDouble:
    """The double, with the child process that tries the driver."""
    monkeypatch.delenv(driver.PROBE_VARIABLE)
    return cufile_double


def test_reference_count(cufile_double: CuFileDouble) -> None:
    with driver.session() as first, driver.session() as second:
        assert first is second
        assert driver.use_count() == 2
        assert driver.library_use_count() == 1
    assert driver.use_count() == driver.library_use_count() == 0
    assert cufile_double.get("calls.cuFileDriverOpen") == cufile_double.get("calls.cuFileDriverClose") == 1
    with pytest.raises(RuntimeError, match="not open"):
        driver.release()


def test_reference_count_from_threads(cufile_double: CuFileDouble) -> None:
    cufile_double.set("delay_us.cuFileDriverOpen", 200)
    wrong: list[int] = []

    def work() -> None:
        for _ in range(50):
            with driver.session():
                if driver.library_use_count() != 1:
                    wrong.append(driver.library_use_count())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert driver.use_count() == 0
    assert cufile_double.get("calls.cuFileDriverOpen") == cufile_double.get("calls.cuFileDriverClose")
    cufile_double.assert_no_leaks()


def test_open_failure_leaves_nothing(cufile_double: CuFileDouble) -> None:
    cufile_double.fail("cuFileDriverOpen", 5033)
    with pytest.raises(CuFileError, match="CU_FILE_NVFS_SETUP_ERROR"):
        driver.acquire()
    assert driver.use_count() == 0
    cufile_double.heal("cuFileDriverOpen")
    with driver.session():
        pass
    cufile_double.assert_no_leaks()


def test_driver_opened_by_somebody_else_is_not_closed(cufile_double: CuFileDouble) -> None:
    cufile_double.fail("cuFileDriverOpen", 5026)
    with driver.session():
        assert driver.use_count() == 1
    assert cufile_double.get("calls.cuFileDriverClose") == 0


def test_close_failure_counts_as_closed(cufile_double: CuFileDouble) -> None:
    cufile_double.fail("cuFileDriverClose", 5006)
    driver.acquire()
    with pytest.raises(CuFileError, match="CU_FILE_DRIVER_CLOSING"):
        driver.release()
    assert driver.use_count() == 0


def test_version_and_properties(cufile_double: CuFileDouble) -> None:
    assert driver.version() == library.Version(1, 15, 0)
    cufile_double.set("props.dstatusflags", 1 << 4 | 1 << 10 | 1 << 11)
    cufile_double.set("props.fflags", 0b0110)
    cufile_double.set("props.major_version", 2)
    cufile_double.set("props.minor_version", 26)
    properties = driver.properties()
    assert properties.nvfs_version == (2, 26)
    assert structs.DriverStatus.NVME_P2P in properties.status
    assert structs.DriverStatus.NFS not in properties.status
    assert properties.control == structs.DriverControl.ALLOW_COMPAT_MODE
    assert properties.features == structs.Feature.BATCH_IO | structs.Feature.STREAMS
    assert (properties.poll_threshold_kib, properties.max_direct_io_kib) == (4, 16384)
    assert (properties.max_device_cache_kib, properties.per_buffer_cache_kib) == (131072, 1024)
    assert (properties.max_pinned_kib, properties.max_batch_entries, properties.batch_timeout_ms) == (33554432, 128, 0)
    cufile_double.assert_no_leaks()


def test_limits(cufile_double: CuFileDouble) -> None:
    with pytest.raises(CuFileError, match="CU_FILE_DRIVER_NOT_INITIALIZED"):
        driver.set_max_cache(4)
    with driver.session():
        driver.set_poll_mode(64)
        driver.set_max_direct_io(1024)
        driver.set_max_cache(2048)
        driver.set_max_pinned(4096)
        properties = driver.properties()
        assert structs.DriverControl.USE_POLL_MODE in properties.control
        driver.set_poll_mode(None)
        assert structs.DriverControl.USE_POLL_MODE not in driver.properties().control
        with pytest.raises(CuFileError, match=r"CU_FILE_DRIVER_UNSUPPORTED_LIMIT.*5 KiB"):
            driver.set_max_direct_io(5)
        with pytest.raises(ValueError, match="negative"):
            driver.set_max_pinned(-4)
    assert (properties.poll_threshold_kib, properties.max_direct_io_kib) == (64, 1024)
    assert (properties.max_device_cache_kib, properties.max_pinned_kib) == (2048, 4096)


def test_parameters(cufile_double: CuFileDouble) -> None:
    size, flag, text = (
        structs.SizeParameter.PROPERTIES_IO_BATCHSIZE,
        structs.BoolParameter.FORCE_COMPAT_MODE,
        structs.StringParameter.LOGGING_LEVEL,
    )
    driver.set_parameter(size, 64)
    driver.set_parameter(flag, True)
    driver.set_parameter(text, "TRACE")
    assert driver.get_parameter(size) == 64
    assert driver.get_parameter(flag) is True
    assert driver.get_parameter(text) == "TRACE"
    assert driver.parameter_range(size) == (1, 256)
    with driver.session(), pytest.raises(CuFileError, match=r"CU_FILE_DRIVER_ALREADY_OPEN.*PROPERTIES_IO_BATCHSIZE=32"):
        driver.set_parameter(size, 32)
    with pytest.raises(TypeError, match="SizeParameter does not take a str"):
        driver.set_parameter(size, "64")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="BoolParameter does not take a int"):
        driver.set_parameter(flag, 1)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="negative"):
        driver.set_parameter(size, -1)


def test_statistics(cufile_double: CuFileDouble) -> None:
    with pytest.raises(CuFileError, match="5022"):
        driver.stats_l1()
    driver.set_stats_level(structs.StatsLevel.PER_GPU)
    assert driver.stats_level() is structs.StatsLevel.PER_GPU
    with driver.session():
        driver.stats_start()
        cufile_double.set("bytes.read", 4096)
        assert driver.stats_l1().read_bytes == 4096
        assert driver.stats_l2().basic.read_bytes == 4096
        printed = driver.stats_dict(driver.stats_l3())
        driver.stats_stop()
        driver.stats_reset()
    assert printed["detailed"]["basic"]["read_bytes"] == 4096
    assert len(printed["per_gpu_stats"]) == 16 and len(printed["per_gpu_stats"][0]["uuid"]) == 16
    assert driver.bar_size_kib(0) == 262144
    with pytest.raises(CuFileError, match="GPU 7"):
        driver.bar_size_kib(7)


def test_wsl_is_never_opened(cufile_double: CuFileDouble, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    version = tmp_path / "version"
    version.write_text("Linux version 5.15.0-microsoft-standard-WSL2")
    monkeypatch.setattr(driver, "_PROC_VERSION", str(version))
    assert not driver.probe().ok
    with pytest.raises(CuFileUnavailableError, match="WSL"):
        driver.acquire("never")
    assert cufile_double.get("calls.cuFileDriverOpen") == 0
    monkeypatch.setattr(driver, "_PROC_VERSION", str(tmp_path / "none"))
    assert not driver.is_wsl()


def test_probe_succeeds_once_per_process(probing: CuFileDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    result = driver.probe()
    assert result == driver.ProbeResult(True, "the cuFile driver opens", "")
    monkeypatch.setattr(driver, "_probe_in_child", lambda timeout: pytest.fail("probed twice"))
    with driver.session():
        pass
    # The child opened the driver in its own process, not in this one.
    assert probing.get("calls.cuFileDriverOpen") == 1


def test_abort_is_survived(probing: CuFileDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUFILE_DOUBLE", "open.abort=1")
    with pytest.raises(CuFileUnavailableError, match="SIGABRT"):
        driver.acquire()
    assert driver.use_count() == 0


def test_probe_reports_error_code_and_closed_stdin(probing: CuFileDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUFILE_DOUBLE", "fail.cuFileDriverOpen=5033")
    result = driver.probe()
    assert not result.ok and "CU_FILE_NVFS_SETUP_ERROR (5033)" in result.reason and "NVIDIA driver" in result.remedy
    driver.reset_probe()
    monkeypatch.setenv("CUFILE_DOUBLE", "open.close_stdin=1")
    result = driver.probe()
    assert not result.ok and "descriptor 0" in result.reason


def test_probe_time_out(probing: CuFileDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUFILE_DOUBLE", "open.hang_ms=20000")
    result = driver.probe(timeout=0.5)
    assert not result.ok and "0.5 seconds" in result.reason


def test_probe_without_library_or_python(probing: CuFileDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    assert "TORCHDIRECT_CUFILE_PROBE=0" in driver.probe().remedy
    driver.reset_probe()
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    assert "could not start" in driver.probe().reason
    driver.reset_probe()
    library.unload()
    monkeypatch.setenv(library.ENVIRONMENT_VARIABLE, "/nonexistent")
    assert "names no file" in driver.probe().reason


def test_fork_starts_without_a_session(cufile_double: CuFileDouble) -> None:
    with driver.session():
        pid = os.fork()
        if pid == 0:
            os._exit(driver.use_count())
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert driver.use_count() == 1
