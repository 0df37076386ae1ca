"""A made-up machine: a folder with the files by which kernel and drivers tell about themselves."""

from __future__ import annotations

import gzip
import os
import sys
from pathlib import Path

import pytest

from torchdirect.gds_facts import GdsFacts, Tree, gather
from torchdirect.system import DirectIO, FileSystem

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cufile_double import cufile_double, cufile_double_old, cufile_double_old_path, cufile_double_path

__all__ = ["cufile_double", "cufile_double_old", "cufile_double_old_path", "cufile_double_path"]

NVME = "259:1"
GPU = "0000:41:00.0"
_NVME_PATH = "sys/devices/pci0000:40/0000:40:03.1/0000:42:00.0/nvme/nvme0/nvme0n1"
_OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@U22)\n"
_PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39 UTC 2023\n"


class Machine:
    """As made, GPUDirect Storage has nothing to object to: NVMe, ext4, nvidia-fs, open driver, udev record."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tree = Tree(str(root))
        self.file_system = FileSystem("ext4", "/data", "/dev/nvme0n1p1", ("rw", "relatime"))
        self.direct_io = DirectIO(True, 512, 512, "statx")
        self.device = NVME
        self.write("proc/version", "Linux version 6.8.0-45-generic (buildd@lcy02) #45-Ubuntu SMP\n")
        self.write("proc/sys/kernel/osrelease", "6.8.0-45-generic\n")
        self.write("proc/cmdline", "BOOT_IMAGE=/vmlinuz root=UUID=0a1b iommu=pt secret=hunter2\n")
        self.driver(open_modules=True)
        self.write(f"proc/driver/nvidia/gpus/{GPU}/information", "Model: \t\t NVIDIA H100\nGPU UUID: GPU-12345678\n")
        self.write("proc/driver/nvidia/params", 'RegistryDwords: "RMForceStaticBar1=1;RmForceDisableIomapWC=1;"\n')
        self.write("proc/driver/nvidia-fs/version", "version: 2.26.6\n")
        self.write(
            "proc/driver/nvidia-fs/stats", "GDS Version: 1.15\nReads : n=3 ok=3 err=0\nError : cpu-gpu-pages=0\n"
        )
        self.write("dev/nvidia-fs0", "")
        self.write(f"run/udev/data/b{NVME}", "I:1\nE:ID_FS_USAGE=filesystem\nE:ID_SERIAL=S3CR3T\n")
        self.kernel(p2pdma=True)
        self.write(f"{_NVME_PATH}/nvme0n1p1/partition", "1\n")
        self.block(NVME, f"{_NVME_PATH}/nvme0n1p1")
        self.write("sys/bus/pci/devices/0000:42:00.0/numa_node", "1\n")
        self.write(f"sys/bus/pci/devices/{GPU}/numa_node", "0\n")
        bars = ["0x92000000 0x92ffffff 0x40200", "0x30000000000 0x31fffffffff 0x14220c", "0x0 0x0 0x0"]
        self.write(f"sys/bus/pci/devices/{GPU}/resource", "\n".join(bars) + "\n")
        for node, row in (("node0", "10 32"), ("node1", "32 10")):
            self.write(f"sys/devices/system/node/{node}/distance", row + "\n")

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def remove(self, name: str) -> None:
        path = self.root / name
        if path.is_dir() and not path.is_symlink():
            for below in sorted(path.rglob("*"), reverse=True):
                below.rmdir() if below.is_dir() and not below.is_symlink() else below.unlink()
            path.rmdir()
        else:
            path.unlink()

    def driver(self, *, open_modules: bool) -> None:
        self.write("proc/driver/nvidia/version", _OPEN if open_modules else _PROPRIETARY)

    def kernel(self, *, p2pdma: bool) -> None:
        line = "CONFIG_PCI_P2PDMA=y\n" if p2pdma else "# CONFIG_PCI_P2PDMA is not set\n"
        self.write("proc/config.gz", "")
        (self.root / "proc/config.gz").write_bytes(gzip.compress(b"CONFIG_PCI=y\n" + line.encode()))

    def block(self, device: str, place: str) -> None:
        link = self.root / "sys/dev/block" / device
        link.parent.mkdir(parents=True, exist_ok=True)
        (self.root / place).mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(self.root / place, link.parent))

    def stacked(self, name: str, *slaves: str, **files: str) -> None:
        """Put the file system on a virtual device that lies on others, which are made where they are missing."""
        place = f"sys/devices/virtual/block/{name}"
        for slave in slaves:
            target = next(iter(self.root.glob(f"sys/devices/**/{slave}")), None)
            if target is None:
                target = self.root / f"sys/devices/pci0000:00/0000:00:1f.0/block/{slave}"
                target.mkdir(parents=True)
            link = self.root / place / "slaves" / slave
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(target, link.parent))
        for file, text in files.items():
            self.write(f"{place}/{file.replace('__', '/')}", text + "\n")
        self.device = "253:0"
        self.block(self.device, place)
        self.write(f"run/udev/data/b{self.device}", "E:ID_FS_USAGE=filesystem\n")

    def facts(self) -> GdsFacts:
        return gather(self.device, self.file_system, self.direct_io, self.tree)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    for name in (
        "CUFILE_ENV_PATH_JSON",
        "CUFILE_ALLOW_COMPAT_MODE",
        "CUFILE_FORCE_COMPAT_MODE",
        "CUFILE_USE_PCIP2PDMA",
    ):
        monkeypatch.delenv(name, raising=False)
    root = tmp_path / "machine"
    root.mkdir()
    return Machine(root)
