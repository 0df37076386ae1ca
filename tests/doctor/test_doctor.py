"""The doctor's report on made-up machines, and on this one."""

from __future__ import annotations

import errno
import getpass
import importlib
import json
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from torchdirect import system
from torchdirect.cufile import child, driver
from torchdirect.doctor import Level, Quality, Report, checks, diagnose, facts
from torchdirect.doctor.facts import Gpu, bar1_of_sysfs, driver_registry, gpus, parse_bar1
from torchdirect.doctor.privacy import scrubber
from torchdirect.gds_facts import Tree
from torchdirect.gds_proof import GpuTransfer, Proof
from torchdirect.transfer import TransferType

module = importlib.import_module("torchdirect.doctor.diagnose")

CUFILE = [TransferType.GDS, TransferType.GPU_ASYNC, TransferType.GPU_BATCH]
SYMBOLS = ("cuFileReadAsync", "cuFileBatchIOSetUp", "cuFileSetParameterBool")
DIRECT = Proof(True, driver_opened=True, registered=True, forbade_compatibility=True, symbols=SYMBOLS)
H100 = Gpu(0, "NVIDIA H100", "0000:41:00.0", 128 << 30, 0, True)
H100_TOO = replace(H100, index=1, pci="0000:61:00.0")


@pytest.fixture
def examine(machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cufile_double: Any) -> Any:
    """Diagnose a folder of the made-up machine."""
    monkeypatch.setattr(system, "file_system", lambda path: machine.file_system)
    monkeypatch.setattr(system, "direct_io", lambda path: machine.direct_io)
    monkeypatch.setattr(facts, "device_number", lambda status, file_system: machine.device)

    def examine(*, cards: tuple[Gpu, ...] = (H100,), **options: Any) -> Report:
        return diagnose(tmp_path, tree=machine.tree, gpus=cards, **options)

    return examine


def qualities(report: Report, gpu: int | None = 0) -> dict[str, str]:
    return {v.transfer_type.name: v.quality.value for v in report.transfers if v.gpu == gpu}


def note(report: Report, check: str) -> tuple[str, str]:
    finding = next(f for f in report.findings if f.check == check)
    assert finding.level is Level.NOTE
    return finding.text, finding.remedy


def problem(report: Report, check: str) -> tuple[str, str]:
    finding = next(f for f in report.findings if f.check == check)
    assert finding.level is Level.PROBLEM and finding.remedy
    return finding.text, finding.remedy


def test_direct(examine: Any, tmp_path: Path) -> None:
    before = set(os.listdir(tmp_path))
    report = examine()
    assert report.direct and report.problems == ()
    assert qualities(report) == {
        "GDS": "direct",
        "CPU_ONLY": "available",
        "CPU_GPU": "available",
        "CPU_ASYNC_GPU": "available",
        "CPU_CACHED_GPU": "available",
        "GPU_ASYNC": "direct",
        "GPU_BATCH": "direct",
    }
    assert set(os.listdir(tmp_path)) == before
    notes = {f.check: f.text for f in report.findings if f.level is Level.NOTE}
    assert "distance 32" in notes["numa"]
    assert "registered a file with compatibility mode forbidden" in next(
        f.text for f in report.findings if f.check == "trial"
    )


def test_each_gpu_is_judged(examine: Any) -> None:
    transfers = (GpuTransfer(0, "0000:41:00.0", True), GpuTransfer(1, "0000:61:00.0", False, "CUDA error 2", "free it"))
    proof = replace(DIRECT, ok=False, reason="GPU 1: CUDA error 2", transfers=transfers)
    report = examine(cards=(H100, H100_TOO), trial=lambda *a, **k: proof)
    assert report.direct
    assert qualities(report, 0)["GDS"] == "direct" and qualities(report, 1)["GDS"] == "unavailable"
    assert len(report.transfers) == 14


def test_gpu_that_is_busy(examine: Any) -> None:
    busy = GpuTransfer(1, "0000:61:00.0", False, "CUDA_ERROR_OUT_OF_MEMORY (2)", "free it", tried=False)
    proof = replace(DIRECT, transfers=(GpuTransfer(0, "0000:41:00.0", True), busy))
    report = examine(cards=(H100, H100_TOO), trial=lambda *a, **k: proof)
    assert qualities(report, 0)["GDS"] == qualities(report, 1)["GDS"] == "direct"
    reason = next(v.reason for v in report.transfers if v.gpu == 1)
    assert "registered" in reason and "not on GPU 1: CUDA_ERROR" in note(report, "trial")[0]


def test_trial_that_could_not_be(examine: Any, machine: Any) -> None:
    untried = Proof(False, "no file could be opened", "name another", tried=False)
    report = examine(trial=lambda *a, **k: untried)
    assert qualities(report)["GDS"] == "unavailable"
    assert note(report, "trial") == ("cuFile was not tried: no file could be opened", "name another")
    # Then the facts are all there is to go by.
    machine.file_system = replace(machine.file_system, options=("data=journal",))
    assert qualities(examine(trial=lambda *a, **k: untried))["GDS"] == "compatibility"


def test_trial_that_contradicts_the_facts(examine: Any, machine: Any) -> None:
    machine.file_system = replace(machine.file_system, options=("data=journal",))
    report = examine(trial=lambda *a, **k: DIRECT)
    assert not report.direct and qualities(report)["GDS"] == "compatibility"
    assert "contradicts" in note(report, "trial")[1]


def test_compatibility_mode(examine: Any, machine: Any) -> None:
    machine.remove("proc/driver/nvidia-fs")
    machine.kernel(p2pdma=False)

    def trial(*a: Any, forbid_compatibility: bool, **k: Any) -> Proof:
        if forbid_compatibility:
            return Proof(False, "5001", "load nvidia-fs", forbade_compatibility=True, symbols=SYMBOLS)
        return replace(DIRECT, forbade_compatibility=False)

    report = examine(trial=trial)
    assert not report.direct
    assert {qualities(report)[t.name] for t in CUFILE} == {"compatibility"}
    assert "CONFIG_PCI_P2PDMA" in problem(report, "nvidia-fs")[0]
    assert [f.check for f in report.problems] == ["nvidia-fs"]


def test_facts_have_no_objection_but_the_trial_has(examine: Any) -> None:
    def trial(*a: Any, forbid_compatibility: bool, **k: Any) -> Proof:
        if forbid_compatibility:
            return Proof(False, "no", "do", driver_opened=True, forbade_compatibility=True, symbols=SYMBOLS)
        return replace(DIRECT, forbade_compatibility=False)

    report = examine(trial=trial)
    assert qualities(report)["GDS"] == "compatibility" and "compatibility mode only: no" in problem(report, "trial")[0]


def test_old_libcufile(examine: Any) -> None:
    report = examine(trial=lambda *a, **k: replace(DIRECT, symbols=("cuFileSetParameterBool",)))
    assert qualities(report)["GDS"] == "direct" and qualities(report)["GPU_BATCH"] == "unavailable"


@pytest.mark.parametrize("code", [5027, 5030, 5033])
def test_double_refuses(examine: Any, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setenv("CUFILE_DOUBLE", f"fail.cuFileHandleRegister={code}")
    report = examine()
    assert {qualities(report)[t.name] for t in CUFILE} == {"unavailable"}
    assert f"({code})" in problem(report, "trial")[0] and len(report.problems) == 1


@pytest.mark.parametrize(("fault", "words"), [("fail.cuFileDriverOpen=5033", "(5033)"), ("open.abort=1", "SIGABRT")])
def test_driver_open(examine: Any, monkeypatch: pytest.MonkeyPatch, fault: str, words: str) -> None:
    monkeypatch.setenv("CUFILE_DOUBLE", fault)
    monkeypatch.delenv(driver.PROBE_VARIABLE)
    driver.reset_probe()
    report = examine()
    assert words in problem(report, "trial")[0] and qualities(report)["GDS"] == "unavailable"


def test_one_line_per_cause(examine: Any, machine: Any) -> None:
    machine.remove("run/udev/data/b259:1")
    machine.remove("proc/driver/nvidia-fs")
    machine.kernel(p2pdma=False)
    machine.file_system = replace(machine.file_system, options=("data=journal",))
    machine.write(".dockerenv", "")
    report = examine(trial=lambda *a, **k: Proof(False, "5027", "x", driver_opened=True, symbols=SYMBOLS))
    assert [f.check for f in report.problems] == ["nvidia-fs", "file-system", "udev"]
    checks = [f.check for f in report.findings]
    assert len(checks) == len(set(checks))
    assert "Docker" in next(f.text for f in report.findings if f.check == "container")
    # What makes cuFile impossible is named before what only makes it slow.
    assert "udev" in next(v.reason for v in report.transfers if v.transfer_type is TransferType.GDS)


def test_every_cause_is_told(examine: Any, machine: Any) -> None:
    machine.write("etc/cufile.json", '{"properties": {"force_compat_mode": true}, "denylist": {"mounts": ["/data"]}}')
    assert ["forces" in f.text or "denylist" in f.text for f in examine().problems[:2]] == [True, True]


def test_nothing_is_tried_under_wsl(examine: Any, machine: Any) -> None:
    machine.write("proc/version", "Linux 5.15-microsoft-standard-WSL2")
    report = examine(trial=lambda *a, **k: pytest.fail("tried"))
    assert "WSL" in problem(report, "wsl")[0] and qualities(report)["CPU_ASYNC_GPU"] == "available"


def test_no_libcufile(examine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDIRECT_LIBCUFILE", "/nonexistent/libcufile.so.0")
    report = examine(trial=lambda *a, **k: pytest.fail("tried"))
    assert "names no file" in problem(report, "libcufile")[0] and qualities(report)["GDS"] == "unavailable"


def test_gpu_that_torch_cannot_use(examine: Any) -> None:
    report = examine(cards=(replace(H100, usable=False),), trial=lambda *a, **k: DIRECT)
    assert not report.direct and problem(report, "gpu")
    assert qualities(report)["CPU_GPU"] == "unavailable" and qualities(report)["CPU_ONLY"] == "available"


def test_p2pdma_and_iommu(examine: Any, machine: Any) -> None:
    machine.remove("proc/driver/nvidia-fs")
    machine.write("etc/cufile.json", '{"properties": {"use_pci_p2pdma": true}}')
    machine.write("sys/module/nvme_core/parameters/multipath", "Y\n")
    machine.write("sys/class/iommu/dmar0/x", "")
    assert "multipath=N" in problem(examine(), "p2pdma")[1]
    machine.write("sys/module/nvme_core/parameters/multipath", "N\n")
    machine.write("proc/driver/nvidia/params", 'RegistryDwords: ""\n')
    machine.write("proc/cmdline", "quiet\n")
    notes = {f.check: f.remedy for f in examine().findings if f.level is Level.NOTE}
    assert "RMForceStaticBar1=1" in notes["p2pdma"] and "iommu=pt" in notes["iommu"]


def test_iommu_of_the_devices_themselves(machine: Any) -> None:
    gpu, disk = "0000:41:00.0", "0000:42:00.0"
    assert facts.iommu(machine.tree, (gpu, disk), ()) == "none"
    machine.write("sys/kernel/iommu_groups/1/type", "DMA-FQ")
    assert facts.iommu(machine.tree, (gpu, disk), ()) == "translating"
    assert facts.iommu(machine.tree, (gpu, disk), ("iommu=pt",)) == "passthrough"
    machine.write(f"sys/bus/pci/devices/{gpu}/iommu_group/type", "identity\n")
    machine.write(f"sys/bus/pci/devices/{disk}/iommu_group/type", "identity\n")
    assert facts.iommu(machine.tree, ("", gpu, disk), ()) == "passthrough"
    machine.write(f"sys/bus/pci/devices/{disk}/iommu_group/type", "DMA\n")
    assert facts.iommu(machine.tree, (gpu, disk), ("iommu=pt",)) == "translating"


def test_faults_that_nvidia_fs_counted(examine: Any, machine: Any) -> None:
    stats = "IO stats: Enabled, peer IO stats: Disabled\nReads\t\t: n=9 ok=7 err=2 io_state_err=0\nWrites : err=0\n"
    stats += "GPU 0000:be:00.0 uuid:87e5c586-88ed-583b : Registered_MiB=0\nError : cpu-gpu-pages=1 sg-ext=0\n"
    machine.write("proc/driver/nvidia-fs/stats", stats)
    assert note(examine(), "nvidia-fs")[0].endswith("faults: Reads err=2, Error cpu-gpu-pages=1")
    machine.write("proc/driver/nvidia-fs/stats", "IO stats: Enabled, peer IO stats: Disabled\nReads : err=0\n")
    text = next(f.text for f in examine().findings if f.check == "nvidia-fs")
    assert text == "nvidia-fs 2.26.6 is loaded and counts transfers"


@pytest.mark.parametrize(
    ("ended", "reason", "remedy"),
    [
        (child.Ended(0, b"0\n"), "", ""),
        (child.Ended(1, b"", b"OSError: libcuda.so.1: cannot open shared object file"), "", ""),
        (child.Ended(0, b"802\n"), "CUDA_ERROR_SYSTEM_NOT_READY (802)", "nvidia-fabricmanager"),
        (child.Ended(0, b"999\n"), "CUDA_ERROR_UNKNOWN (999)", "nvidia-smi"),
        (child.Ended(-6, b""), "ends the process", "dmesg"),
        (child.Ended(None, b""), "within 20 seconds", "Xid"),
    ],
)
def test_cuda_that_does_not_start(
    examine: Any, monkeypatch: pytest.MonkeyPatch, ended: child.Ended, reason: str, remedy: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(child, "python", lambda *a, **k: ended)
    fault = facts.cuda_fault()
    assert (fault is None) is (not reason)
    if fault is None:
        return
    monkeypatch.setattr(facts, "gpus", lambda tree, *, ask_torch: (replace(H100, usable=False),))
    monkeypatch.setattr(facts, "cuda_fault", lambda: fault)
    gathered = replace(facts.gather_facts("/", None, ()), gpus=(replace(H100, usable=False),), cuda_fault=fault)
    verdict = next(v for v in checks.verdicts(gathered, checks.Trials()) if v.transfer_type is TransferType.CPU_GPU)
    assert reason in verdict.reason and remedy in verdict.remedy


def test_small_facts(machine: Any) -> None:
    assert bar1_of_sysfs(machine.tree, "0000:41:00.0") == 128 << 30
    assert gpus(machine.tree) == (Gpu(0, "NVIDIA H100", "0000:41:00.0", 128 << 30, 0, False),)
    assert driver_registry(machine.tree) == {"RMForceStaticBar1": "1", "RmForceDisableIomapWC": "1"}
    text = "GPU 00000000:41:00.0\n    FB Memory Usage\n        Total      : 81559 MiB\n"
    text += "    BAR1 Memory Usage\n        Total      : 131072 MiB\n"
    assert parse_bar1(text) == {"0000:41:00.0": 128 << 30}
    for name, kind in (
        ("run/.containerenv", "Podman"),
        ("run/secrets/kubernetes.io/x", "Kubernetes"),
    ):
        machine.write(name, "")
        assert facts.container(machine.tree) == kind


def test_json_is_stable_and_holds_no_secrets(examine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "t0psecret")
    monkeypatch.setattr(socket, "gethostname", lambda: "node17.corp.example")
    monkeypatch.setattr(getpass, "getuser", lambda: "alice")
    report = examine(
        trial=lambda *a, **k: Proof(False, f"alice@node17: {tmp_path}/x GPU-0a1b2c3d-0000-1111-2222-333344445555", "x")
    )
    document = report.to_json()
    text = json.dumps(document)
    for secret in ("t0psecret", "hunter2", "S3CR3T", "node17", "alice", "GPU-0a1b", "GPU-1234", "root=UUID"):
        assert secret not in text, secret
    assert list(document) == ["schema", "torchdirect", "path", "direct", "transfers", "findings", "facts"]
    assert document["schema"] == 1
    assert {tuple(t) for t in document["transfers"]} == {("type", "code", "gpu", "quality", "reason", "remedy")}
    assert {tuple(f) for f in document["findings"]} == {("check", "level", "text", "remedy")}
    assert [t["code"] for t in document["transfers"]] == list(range(7))
    assert list(document["facts"]) == [
        "kernel", "machine", "wsl", "container", "gpus", "driver", "driver_registry", "torch_cuda", "cuda_fault",
        "libcufile", "cufile_config", "nvidia_fs", "kernel_p2pdma", "nvme_multipath", "iommu", "file_system",
        "direct_io", "disk", "udev_record", "memlock_bytes", "directory_writable",
    ]  # fmt: skip


def test_server_of_a_network_file_system_is_not_told(examine: Any, machine: Any) -> None:
    machine.device = "0:52"
    machine.file_system = system.FileSystem("nfs4", "/home/x", "filer7:/vol", ("rw", "proto=tcp", "addr=10.1.2.3"))
    text = json.dumps(examine().to_json())
    assert "filer7" not in text and "10.1.2.3" not in text and "proto=tcp" in text


def test_paths_are_written_as_the_user_named_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    monkeypatch.chdir(tmp_path)
    clean = scrubber("link/file.pt")
    assert clean({"a": [f"{real}/file.pt failed in {real}"]}) == {"a": ["link/file.pt failed in link"]}


def test_home_of_the_user_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "alice"))
    monkeypatch.setattr(getpass, "getuser", lambda: "alice")
    (tmp_path / "alice").mkdir()
    assert diagnose(tmp_path / "alice" / "x.pt", live=False).path == "~/x.pt"


def test_paths_that_no_terminal_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = os.fsencode(tmp_path) + b"/\xff\x1b[31m\n.pt"
    shown = diagnose(os.fsdecode(path), live=False).path
    assert shown.endswith(r"/\udcff\x1b[31m\n.pt") and shown.isprintable()
    json.dumps(diagnose(os.fsdecode(path), live=False).to_json(), ensure_ascii=False).encode()


def test_working_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert diagnose(tmp_path, live=False).path == str(tmp_path)
    with pytest.raises(FileNotFoundError):
        diagnose()


def test_odd_mount_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = b"".join(b"%d 1 0:%d / /mnt/%d rw - nfs4 filer:/%d rw\n" % (i, i, i, i) for i in range(20_000))
    odd = b"\n - \nx\n1 2 a:b / / rw - ext4 /dev/x rw\n1 2 8:1 / /\xff\\040 rw - ext4 /dev/x\n1 2 : / / rw - x y z\n"
    (tmp_path / "mountinfo").write_bytes(odd + table + odd)
    monkeypatch.setattr(system, "_MOUNTINFO", str(tmp_path / "mountinfo"))
    assert len(diagnose(tmp_path, live=False).transfers) % 7 == 0
    place = tmp_path / "form\x0cfeed"
    place.mkdir()
    (tmp_path / "mountinfo").write_text(f"1 2 0:999999 / {place} rw - lustre mgs:/x rw,flock\n")
    assert system.file_system(place).type == "lustre"
    monkeypatch.setattr(system, "_MOUNTINFO", str(tmp_path / "none"))
    assert len(diagnose(tmp_path, live=False).transfers) % 7 == 0


def test_machine_that_shows_nothing(tmp_path: Path, cufile_double: Any) -> None:
    report = diagnose(tmp_path, tree=Tree(str(tmp_path / "nothing")))
    assert not report.direct and report.problems[0].check == "gpu"


def test_this_machine(tmp_path: Path) -> None:
    report = diagnose(tmp_path)
    assert len(report.transfers) % 7 == 0
    for verdict in report.transfers:
        assert verdict.quality in (Quality.DIRECT, Quality.AVAILABLE) or verdict.remedy
    assert all(finding.remedy for finding in report.problems)
    assert os.listdir(tmp_path) == []


def test_bad_path(tmp_path: Path) -> None:
    assert diagnose(tmp_path / "not-yet.pt", live=False).path.endswith("not-yet.pt")
    with pytest.raises(FileNotFoundError, match="neither it nor its directory"):
        diagnose(tmp_path / "a" / "b")
    with pytest.raises(OSError, match="neither a regular file nor a directory"):
        diagnose("/dev/null")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        diagnose(tmp_path / "file" / "below")
    (tmp_path / "loop").symlink_to("loop")
    for bad in ("", "with\0null", tmp_path / "loop"):
        with pytest.raises(OSError):
            diagnose(bad)


def tried_on(place: Path) -> tuple[str, bool]:
    tried: list[tuple[str, bool]] = []

    def trial(target: str, *, forbid_compatibility: bool, writable: bool) -> Proof:
        tried.append((target, writable))
        return DIRECT

    module._try(str(place), trial)
    (answer,) = tried
    return answer


def test_what_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "there.pt"
    file.write_bytes(b"")
    target, writable = tried_on(file)
    assert writable and os.path.dirname(target) == str(tmp_path) and target != str(file)

    def refuse(directory: str, nbytes: int) -> Any:
        raise PermissionError(errno.EACCES, "no")

    with monkeypatch.context() as patch:
        patch.setattr(module, "trial_file", refuse)
        assert tried_on(file) == (str(file), False)
    # A single file that is a mount of its own, as containers make them.
    stat = os.stat

    def stat_of_a_mount(path: Any) -> Any:
        status = stat(path)
        return os.stat_result((*status[:2], status.st_dev + 1, *status[3:])) if path == str(file) else status

    monkeypatch.setattr(os, "stat", stat_of_a_mount)
    assert tried_on(file) == (str(file), False) and os.listdir(tmp_path) == ["there.pt"]


def test_a_link_leads_to_where_the_file_will_be(examine: Any, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "link.pt").symlink_to(tmp_path / "data" / "not-yet.pt")
    assert module._existing(str(tmp_path / "link.pt")) == str(tmp_path / "data")
