"""Is GPUDirect Storage real for a file: facts in, decision out, and the cached answer."""

from __future__ import annotations

import concurrent.futures
import errno
import gzip
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from torchdirect import gds_proof, system
from torchdirect import gds_status as module
from torchdirect.cufile import child
from torchdirect.gds_facts import NvidiaDriver, Tree, cufile_config, disk_below, ext4_journal, gather
from torchdirect.gds_proof import GpuTransfer, Proof, judge, prove, trial_file
from torchdirect.gds_status import conclude, gds_status, objections
from torchdirect.system import DirectIO, FileSystem

NVME = "259:1"
NVME_PATH = "sys/devices/pci0000:40/0000:40:03.1/0000:42:00.0/nvme/nvme0/nvme0n1"


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
    assert "565 or newer, and 550.54.14" in first(machine)[0]


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


def test_p2pdma_needs_a_plain_local_disk(machine: Any) -> None:
    machine.remove("proc/driver/nvidia-fs")
    machine.write("etc/cufile.json", '{"properties": {"use_pci_p2pdma": true}}')
    machine.write(f"{NVME_PATH}/device/transport", "pcie\n")
    assert module.judge(machine.facts()) is None
    machine.write(f"{NVME_PATH}/device/transport", "rdma\n")
    assert "reached over rdma" in first(machine)[0]
    machine.stacked("md0", "nvme0n1", md__level="raid0")
    assert "does not serve md RAID" in first(machine)[0]
    machine.write(
        "etc/cufile.json", '{"properties": {"use_pci_p2pdma": true}, "block": {"raid": {"use_pci_p2pdma": true}}}'
    )
    assert module.judge(machine.facts()) is None


def test_nvme_over_tcp(machine: Any) -> None:
    machine.write(f"{NVME_PATH}/device/transport", "tcp\n")
    assert first(machine)[0] == "the disk nvme0n1 is reached over TCP"


def test_nvme_with_multipathing(machine: Any) -> None:
    subsystem = "sys/devices/virtual/nvme-subsystem/nvme-subsys0"
    machine.block("259:7", f"{subsystem}/nvme0n1")
    (machine.root / subsystem / "nvme0").symlink_to(machine.root / NVME_PATH / "..")
    disk = disk_below(machine.tree, "259:7")
    assert (disk.kind, disk.pci, disk.numa_node) == ("nvme", "0000:42:00.0", 1)


def test_what_nvidia_fs_may_serve_is_left_to_the_trial(machine: Any) -> None:
    for device, name in (("8:1", "sda"), ("8:2", "sfdv0n1")):
        machine.device = device
        machine.block(device, f"sys/devices/pci0000:00/0000:00:02.0/block/{name}")
        machine.write(f"run/udev/data/b{device}", "E:ID_FS_USAGE=filesystem\n")
        assert objections(machine.facts()) == ()
    machine.remove("proc/driver/nvidia-fs")
    assert first(machine)[0] == "the disk sfdv0n1 is no NVMe device"


def test_denied_disk(machine: Any) -> None:
    machine.write("etc/cufile.json", '{"denylist": {"devices": ["/dev/nvme0n1"]}}')
    assert "denylist" in first(machine)[0]


@pytest.mark.parametrize(
    ("listed", "options", "journal"),
    [
        ("rw\ndata=ordered\n", (), "ordered"),
        # The mount table is silent about a mode that the file system itself has as its default.
        ("rw\ndata=writeback\n", ("rw",), "writeback"),
        ("rw\ndelalloc\n", (), "none"),
        (None, ("data=journal",), "journal"),
        (None, ("rw",), ""),
    ],
)
def test_journal(machine: Any, listed: str | None, options: tuple[str, ...], journal: str) -> None:
    machine.file_system = FileSystem("ext4", "/data", "/dev/nvme0n1p1", options)
    if listed is not None:
        machine.write("proc/fs/ext4/nvme0n1p1/options", listed)
    assert machine.facts().journal == journal
    assert bool(objections(machine.facts())) is (journal in ("writeback", "journal"))
    assert ext4_journal(machine.tree, NVME, FileSystem("xfs", "/", "", ())) == ""


def test_damaged_files_of_the_kernel(machine: Any) -> None:
    damaged = gzip.compress(b"CONFIG_PCI_P2PDMA=y\n" * 1000)
    (machine.root / "proc/config.gz").write_bytes(damaged[:20] + b"\x00" * 20 + damaged[40:])
    machine.write("proc/driver/nvidia/version", "nonsense")
    machine.write("proc/driver/nvidia-fs/version", "nonsense")
    machine.write("sys/bus/pci/devices/0000:42:00.0/numa_node", "nonsense")
    machine.write("etc/cufile.json", "[" * 100_000)
    facts = machine.facts()
    assert facts.kernel_p2pdma is None and facts.driver == NvidiaDriver("", None) and facts.nvidia_fs == ""
    assert facts.disk.numa_node == -1 and "not valid JSON" in facts.config.error


def test_machine_without_any_files(tmp_path: Path) -> None:
    tree = Tree(str(tmp_path / "nothing"))
    facts = gather("259:1", FileSystem("unknown", "/", "", ()), DirectIO(True, 512, 512, "statx"), tree)
    assert (facts.wsl, facts.driver, facts.gpus, facts.disk.kind) == (False, None, 0, "hidden")
    assert objections(facts)[0].check == "gpu"


def test_configuration_that_is_a_named_pipe(machine: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert cufile_config(machine.tree, {"CUFILE_ENV_PATH_JSON": str(tmp_path / "pipe")}).error


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
        (
            Proof(False, "5001", "x", refused=True, forbade_compatibility=True),
            False,
            True,
            "without compatibility mode",
        ),
        (Proof(False, "probe failed", "x"), False, False, "probe failed"),
        (Proof(False, "hung", "x", forbade_compatibility=True), False, False, "hung"),
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


def test_trial_tells_what_the_log_says(cufile_double: Any, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended:
        returncode = 0
        stdout = b'PROOF {"step": "open", "status": [5030, 0]}'
        logged = "cufio-udev:67 udev property not found"

    monkeypatch.setattr(child, "python", lambda *a, **k: Ended)
    assert "(5030)" in prove(data).reason and prove(data).reason.endswith(f"(cufile.log: {Ended.logged})")


def test_gpu_that_is_busy_does_not_speak_against_cufile() -> None:
    busy = {"step": "gpu", "index": 0, "pci": "0000:41:00.0", "cuda": 2}
    proof = judge([{"step": "register", "status": [0, 0]}, busy, {"step": "end"}], 0)
    assert proof.ok and not proof.transfers[0].ok and "CUDA_ERROR_OUT_OF_MEMORY (2)" in proof.transfers[0].reason


def test_trial_without_a_place_to_work(cufile_double: Any, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    proof = prove(data)
    assert "could not start" in proof.reason and not proof.tried


def test_trial_file_is_removed_on_every_way_out(tmp_path: Path) -> None:
    for error in (KeyboardInterrupt, SystemExit, OSError):
        with pytest.raises(error), trial_file(str(tmp_path)) as path:
            assert os.path.dirname(path) == str(tmp_path) and os.stat(path).st_mode & 0o777 == 0o600
            raise error
        assert os.listdir(tmp_path) == []
    with trial_file(str(tmp_path)) as path:
        os.unlink(path)


def test_trial_file_is_removed_when_it_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="full"), trial_file(str(tmp_path)):
        pytest.fail("made")
    assert os.listdir(tmp_path) == []


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
    assert "did not end in time; its last step was 'symbols'" in prove(data, timeout=0.5).reason


def test_trial_of_what_is_no_file(cufile_double: Any) -> None:
    assert "no file could be opened" in prove("/dev/null").reason
    assert "no file could be opened" in prove("/nonexistent").reason


# --------------------------------------------------------------------------------------------------------------------
# The cached answer
# --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(machine: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Let every file be on the made-up machine; the list of what was tried there, which always succeeds."""
    tried: list[Any] = []

    def trial(place: Any, *, gpu: Any) -> Proof:
        tried.append((place, gpu))
        return Proof(True, forbade_compatibility=True, driver_opened=True)

    monkeypatch.setattr(module, "gather", lambda *arguments: machine.facts())
    monkeypatch.setattr(gds_proof, "prove", trial)
    module.reset()
    yield tried
    module.reset()


def test_answer_is_kept_per_file_system(tmp_path: Path, machine: Any, asked: list[Any]) -> None:
    missing = tmp_path / "not" / "there.pt"
    assert gds_status(missing).direct and asked == [(str(tmp_path), "none")]
    start = time.perf_counter()
    for _ in range(100):
        assert gds_status(tmp_path).direct
    assert (time.perf_counter() - start) / 100 < 1e-3
    with open(machine.root / "proc/version") as file:
        assert gds_status(file.fileno()).direct
    assert len(asked) == 1


def test_overlay_has_an_answer_of_its_own(tmp_path: Path, asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    gds_status(tmp_path)
    monkeypatch.setattr(system, "file_system_type", lambda place: "overlay")
    gds_status(tmp_path)
    assert len(asked) == 2


def test_only_the_process_own_gpu_is_tried(tmp_path: Path, asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    free = 8 << 30
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 << 30))
    gds_status(tmp_path)
    free = 100 << 20
    module.reset()
    gds_status(tmp_path)
    assert [gpu for _, gpu in asked] == [3, "none"]


def test_a_file_without_direct_io_does_not_answer_for_others(tmp_path: Path, machine: Any, asked: list[Any]) -> None:
    machine.direct_io = DirectIO(False, 1, 1, "encrypted")
    assert "encrypted" in gds_status(tmp_path).reason
    machine.direct_io = DirectIO(True, 512, 512, "statx")
    assert gds_status(tmp_path).direct


@pytest.mark.parametrize(
    "fault",
    [
        lambda m: m.remove("proc/driver/nvidia"),
        lambda m: m.remove("proc/driver/nvidia-fs"),
        lambda m: m.remove("dev/nvidia-fs0"),
        lambda m: m.remove("run/udev/data/b259:1"),
        lambda m: m.write("proc/version", "Linux 5.15-microsoft-standard-WSL2"),
        lambda m: m.write("etc/cufile.json", '{"properties": {"force_compat_mode": true}}'),
        lambda m: setattr(m, "file_system", FileSystem("overlay", "/", "overlay", ())),
        lambda m: setattr(m, "file_system", FileSystem("ext4", "/", "/dev/x", ("data=journal",))),
        lambda m: setattr(m, "direct_io", DirectIO(False, 1, 1, "no")),
        lambda m: m.stacked("dm-0", "nvme0n1", dm__uuid="LVM-abcdef"),
    ],
)
def test_a_no_by_facts_starts_no_process(
    tmp_path: Path, machine: Any, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Any], None]
) -> None:
    fault(machine)
    monkeypatch.setattr(module, "gather", lambda *arguments: machine.facts())
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("started a process"))
    module.reset()
    answer = gds_status(tmp_path)
    module.reset()
    assert not answer.direct and answer.remedy and "could not be found out" not in answer.reason


def test_never_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cannot be looked up" in gds_status(10**6).reason
    assert not gds_status("/proc/version/below").direct
    for odd in (-1, 2**70, "with\0null", b"\xff\xfe", os.fsdecode(b"/\xff/\xfe"), ""):
        assert not gds_status(odd).direct

    def fail(*arguments: Any) -> Any:
        raise ZeroDivisionError("by accident")

    module.reset()
    monkeypatch.setattr(module, "gather", fail)
    assert "ZeroDivisionError: by accident" in gds_status(tmp_path).reason
    module.reset()


def test_threads_share_one_trial(tmp_path: Path, asked: list[Any]) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(answer.direct for answer in pool.map(lambda _: gds_status(tmp_path), range(32)))
    assert len(asked) == 1


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
