"""Is GPUDirect Storage real for a file: facts in, decision out, and the cached answer."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from torchdirect import gds_status as module
from torchdirect.gds_facts import cufile_config, disk_below
from torchdirect.gds_proof import GpuTransfer, Proof, judge, prove
from torchdirect.gds_status import conclude, gds_status, objections
from torchdirect.system import DirectIO, FileSystem


def first(machine: Any) -> tuple[str, bool, str]:
    verdict = module.judge(machine.facts())
    assert verdict is not None and not verdict.direct and verdict.remedy
    return verdict.reason, verdict.compatible, verdict.remedy


def test_nothing_to_object_to(machine: Any) -> None:
    assert objections(machine.facts()) == ()
    assert module.judge(machine.facts()) is None
    facts = machine.facts()
    assert (facts.driver.version, facts.driver.open_modules, facts.nvidia_fs) == ("580.95.05", True, "2.26.6")
    assert (facts.disk.kind, facts.disk.pci, facts.disk.numa_node) == ("nvme", "0000:42:00.0", 1)
    assert facts.disk.layers == ("nvme0n1",)


def test_wsl(machine: Any) -> None:
    machine.write("proc/version", "Linux version 5.15.153.1-microsoft-standard-WSL2\n")
    reason, compatible, _ = first(machine)
    assert "WSL" in reason and not compatible


def test_no_gpu(machine: Any) -> None:
    machine.remove("proc/driver/nvidia")
    reason, compatible, remedy = first(machine)
    assert reason == "no NVIDIA GPU or driver is visible here" and not compatible and "--gpus all" in remedy
    machine.driver(open_modules=True)
    assert "shows no GPU" in first(machine)[0]


@pytest.mark.parametrize("record", [None, "I:1\nE:ID_SERIAL=x\n"])
def test_container_without_udev(machine: Any, record: str | None) -> None:
    machine.remove("run/udev/data/b259:1")
    if record:
        machine.write("run/udev/data/b259:1", record)
    reason, compatible, remedy = first(machine)
    assert "b259:1" in reason and "-v /run/udev:/run/udev:ro" in remedy and not compatible


def test_no_nvidia_fs(machine: Any) -> None:
    machine.remove("proc/driver/nvidia-fs")
    reason, compatible, remedy = first(machine)
    assert reason.startswith("nvidia-fs is not loaded, and PCI P2PDMA is not switched on") and compatible
    assert "use_pci_p2pdma" in remedy
    machine.write("etc/cufile.json", '{"properties": {"use_pci_p2pdma": true}}')
    assert module.judge(machine.facts()) is None
    machine.driver(open_modules=False)
    assert "open kernel modules" in first(machine)[0]
    machine.kernel(p2pdma=False)
    assert "CONFIG_PCI_P2PDMA" in first(machine)[0]
    # A kernel that does not tell is given the benefit of the doubt.
    machine.driver(open_modules=True)
    machine.remove("proc/config.gz")
    assert module.judge(machine.facts()) is None
    machine.write("boot/config-6.8.0-45-generic", "# CONFIG_PCI_P2PDMA is not set\n")
    assert "CONFIG_PCI_P2PDMA" in first(machine)[0]


def test_old_driver_has_no_p2pdma(machine: Any) -> None:
    machine.remove("proc/driver/nvidia-fs")
    machine.write("etc/cufile.json", '{"properties": {"use_pci_p2pdma": true}}')
    machine.write(
        "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.14  Release\n"
    )
    assert "570 or newer, and 550.54.14" in first(machine)[0]


def test_nvidia_fs_without_nodes(machine: Any) -> None:
    machine.remove("dev/nvidia-fs0")
    reason, compatible, remedy = first(machine)
    assert "/dev/nvidia-fs*" in reason and "--device" in remedy and not compatible


@pytest.mark.parametrize(
    ("kind", "options", "words", "compatible"),
    [
        ("overlay", (), "overlay", False),
        ("tmpfs", (), "in memory", False),
        ("btrfs", (), "does not support btrfs", True),
        ("fuse.sshfs", (), "does not support fuse.sshfs", True),
        ("cifs", (), "does not support cifs", True),
        ("nfs4", ("proto=tcp", "addr=10.0.0.1"), "TCP", True),
        ("ext4", ("rw", "data=journal"), "data=journal", True),
        ("ext4", ("rw", "data=writeback"), "data=writeback", True),
    ],
)
def test_file_systems(machine: Any, kind: str, options: tuple[str, ...], words: str, compatible: bool) -> None:
    machine.file_system = FileSystem(kind, "/data", "source", options)
    if kind not in ("ext4", "btrfs"):
        machine.device = "0:52"
    reason, works, _ = first(machine)
    assert words in reason and works is compatible


@pytest.mark.parametrize(("kind", "options"), [("xfs", ()), ("nfs4", ("proto=rdma",)), ("lustre", ()), ("wekafs", ())])
def test_good_file_systems(machine: Any, kind: str, options: tuple[str, ...]) -> None:
    machine.file_system = FileSystem(kind, "/data", "source", options)
    if kind != "xfs":
        machine.device = "0:52"
    assert objections(machine.facts()) == ()


def test_lvm_and_crypt(machine: Any) -> None:
    machine.stacked("dm-0", "nvme0n1", dm__uuid="LVM-abcdef")
    reason, compatible, _ = first(machine)
    assert "LVM (dm-0 on nvme0n1)" in reason and compatible and "abcdef" not in reason


def test_raid(machine: Any) -> None:
    machine.stacked("md0", "nvme0n1", md__level="raid0")
    assert objections(machine.facts()) == ()
    machine.write("sys/devices/virtual/block/md0/md/level", "raid1\n")
    assert "md raid1 of nvme" in first(machine)[0]


def test_raid_of_sata_disks(machine: Any) -> None:
    machine.stacked("md0", "sda", md__level="raid0")
    assert "md raid0 of scsi" in first(machine)[0]


def test_lvm_on_raid(machine: Any) -> None:
    machine.stacked("md0", "nvme0n1", md__level="raid0")
    machine.remove("sys/dev/block/253:0")
    machine.stacked("dm-1", "md0", dm__uuid="LVM-x")
    assert machine.facts().disk.layers == ("dm-1", "md0", "nvme0n1")
    assert "LVM" in first(machine)[0]


def test_virtio(machine: Any) -> None:
    machine.device = "254:0"
    machine.block("254:0", "sys/devices/pci0000:00/0000:00:02.0/virtio1/block/vda")
    machine.write("run/udev/data/b254:0", "E:ID_FS_USAGE=filesystem\n")
    reason, compatible, _ = first(machine)
    assert reason == "the disk vda is no NVMe device but virtio" and compatible


def test_device_that_sysfs_does_not_show(machine: Any) -> None:
    assert disk_below(machine.tree, "8:77").kind == "hidden"
    assert disk_below(machine.tree, "0:52").kind == "none"


def test_no_direct_io(machine: Any) -> None:
    machine.direct_io = DirectIO(False, 1, 1, "statx says no")
    assert first(machine)[:2] == ("O_DIRECT does not work: statx says no", True)


def test_configuration(machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """{
        // comment with "quotes"
        "properties": {"allow_compat_mode": false, "use_pci_p2pdma": true,},
        "fs": {"generic": {"url": "http://not.a.comment"}}, /* block */
        "block": {"nvme": {"use_pci_p2pdma": false}},
        "denylist": {"drivers": [], "mounts": ["/data"], "filesystems": []}
    }"""
    machine.write("etc/cufile.json", text)
    config = cufile_config(machine.tree, {})
    assert (config.allow_compat_mode, config.use_pci_p2pdma, config.nvme_p2pdma) == (False, True, False)
    assert config.path == "/etc/cufile.json" and config.denied == ("/data",) and not config.error
    reason, compatible, remedy = first(machine)
    assert "denylist" in reason and not compatible and "remove" in remedy
    assert cufile_config(machine.tree, {"CUFILE_ALLOW_COMPAT_MODE": "true"}).allow_compat_mode is True
    other = tmp_path / "mine.json"
    other.write_text("{")
    assert "not valid JSON" in cufile_config(machine.tree, {"CUFILE_ENV_PATH_JSON": str(other)}).error
    assert "cannot be read" in cufile_config(machine.tree, {"CUFILE_ENV_PATH_JSON": str(tmp_path / "none")}).error
    machine.remove("etc/cufile.json")
    monkeypatch.setenv("CUFILE_FORCE_COMPAT_MODE", "true")
    assert "forces compatibility mode" in first(machine)[0]


@pytest.mark.parametrize(
    ("proof", "direct", "compatible", "words"),
    [
        (Proof(True, forbade_compatibility=True, driver_opened=True), True, True, "registered the file"),
        (
            Proof(True, forbade_compatibility=True, driver_opened=True, transfers=(GpuTransfer(0, "", True),)),
            True,
            True,
            "read the file",
        ),
        (Proof(True, driver_opened=True), False, True, "cannot forbid"),
        (Proof(True, driver_opened=True, nvfs_version=(2, 26)), True, True, "nvidia-fs"),
        (Proof(False, "5001", "x", forbade_compatibility=True), False, True, "without compatibility mode"),
        (Proof(False, "probe failed", "x"), False, False, "probe failed"),
        (Proof(False, "5027", "x", driver_opened=True, forbade_compatibility=True), False, True, "5027"),
    ],
)
def test_conclusion_of_a_trial(machine: Any, proof: Proof, direct: bool, compatible: bool, words: str) -> None:
    status = conclude(machine.facts(), proof)
    assert (status.direct, status.compatible) == (direct, compatible) and words in status.reason
    assert direct or status.remedy


def test_child_that_died() -> None:
    steps: list[dict[str, Any]] = [
        {"step": "load"},
        {"step": "symbols", "symbols": [], "forbade": True},
        {"step": "open", "status": [0, 0]},
    ]
    proof = judge(steps, -6)
    assert not proof.ok and "SIGABRT after the step 'open'" in proof.reason
    assert "start" in judge([], 1).reason


def test_transfers_of_a_child() -> None:
    good = {"step": "gpu", "index": 0, "pci": "00000000:41:00.0", "cuda": 0, "buffer": [0, 0], "cuFileRead": [4096, 0]}
    bad = dict(good, index=1, pci="00000000:61:00.0", cuFileRead=[-5030, 0])
    short = dict(good, index=2, pci="00000000:81:00.0", cuFileRead=[512, 0])
    steps: list[dict[str, Any]] = [{"step": "register", "status": [0, 0]}, good, bad, short, {"step": "end"}]
    proof = judge(steps, 0)
    assert not proof.ok and "GPU 1" in proof.reason and "5030" in proof.reason
    found = proof.on_gpu("0000:41:00.0", 5)
    assert found is not None and found.ok
    assert "512 of 4096" in proof.transfers[2].reason


# --------------------------------------------------------------------------------------------------------------------
# Trials with the double, in real child processes
# --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.bin"
    path.write_bytes(bytes(8192))
    return path


def test_trial_registers_strictly(cufile_double: Any, data: Path) -> None:
    proof = prove(data)
    assert proof.ok and proof.forbade_compatibility and proof.registered
    assert set(proof.symbols) == {"cuFileReadAsync", "cuFileBatchIOSetUp", "cuFileSetParameterBool"}
    assert not prove(data, forbid_compatibility=False).forbade_compatibility
    assert data.read_bytes() == bytes(8192)


def test_trial_leaves_nothing(cufile_double: Any, tmp_path: Path) -> None:
    assert prove(tmp_path).ok
    fd = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR)
    try:
        assert prove(fd).ok
    finally:
        os.close(fd)
    assert [name for name in os.listdir(tmp_path) if name.startswith(".torchdirect")] == []


def test_trial_of_an_old_library(cufile_double_old: Any, data: Path) -> None:
    proof = prove(data)
    assert proof.ok and not proof.forbade_compatibility and "cuFileReadAsync" not in proof.symbols


@pytest.mark.parametrize("code", [5027, 5030, 5033])
def test_trial_that_registration_refuses(
    cufile_double: Any, data: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setenv("CUFILE_DOUBLE", f"fail.cuFileHandleRegister={code}")
    proof = prove(data)
    assert not proof.ok and str(code) in proof.reason and proof.remedy and proof.driver_opened


def test_trial_that_hangs(cufile_double: Any, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUFILE_DOUBLE", "open.hang_ms=20000")
    assert "within 0.5 seconds" in prove(data, timeout=0.5).reason


def test_trial_of_what_is_no_file(cufile_double: Any) -> None:
    assert "no file could be opened" in prove("/dev/null").reason
    assert "no file could be opened" in prove("/nonexistent").reason


# --------------------------------------------------------------------------------------------------------------------
# The cached answer
# --------------------------------------------------------------------------------------------------------------------


def test_answer_is_kept_per_device(tmp_path: Path, machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def trial(place: Any) -> Proof:
        calls.append(place)
        return Proof(True, forbade_compatibility=True, driver_opened=True)

    monkeypatch.setattr(module, "gather", lambda *arguments: machine.facts())
    monkeypatch.setattr(module, "prove", trial)
    module.reset()
    try:
        missing = tmp_path / "not" / "there.pt"
        assert gds_status(missing).direct and calls == [str(tmp_path)]
        start = time.perf_counter()
        for _ in range(100):
            assert gds_status(tmp_path).direct
        assert (time.perf_counter() - start) / 100 < 1e-3
        with open(machine.root / "proc/version") as file:
            assert gds_status(file.fileno()).direct
        assert len(calls) == 1
    finally:
        module.reset()


def test_never_raises() -> None:
    assert "cannot be looked up" in gds_status(10**6).reason
    assert not gds_status("/proc/version/below").direct


def test_a_no_by_facts_loads_nothing(tmp_path: Path) -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import torch\n"
        "from torchdirect.gds_status import gds_status\n"
        "from torchdirect.cufile import library\n"
        "s = gds_status(sys.argv[2])\n"
        "print(library.loaded() is None, torch.cuda.is_initialized(), s.direct)\n"
    )
    source = str(Path(module.__file__).parents[1])
    answer = subprocess.run(
        [sys.executable, "-c", program, source, "/dev/shm"], capture_output=True, text=True, check=True
    )
    assert answer.stdout.split() == ["True", "False", "False"]
