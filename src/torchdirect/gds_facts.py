"""What decides whether GPUDirect Storage is real for a file, as the kernel, udev and libcufile's configuration tell it.

All of it is read from small files: nothing here loads libcufile, touches CUDA or starts a process.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import stat
import zlib
from dataclasses import dataclass
from typing import Any

from torchdirect.system import DirectIO, FileSystem

__all__ = [
    "CuFileConfig",
    "Disk",
    "GdsFacts",
    "NvidiaDriver",
    "Tree",
    "cufile_config",
    "device_number",
    "disk_below",
    "gather",
    "gpu_addresses",
]


@dataclass(frozen=True)
class Tree:
    """The files by which the kernel and the drivers tell about themselves, below a root (another one in tests)."""

    root: str = "/"

    def path(self, name: str) -> str:
        """Return where a file named from the root, without a leading slash, really is."""
        return os.path.join(self.root, name)

    def read(self, name: str) -> str | None:
        """Return the text of a file, or None where it is missing or may not be read."""
        try:
            with open(self.path(name), "rb") as file:
                return file.read().decode(errors="replace")
        except OSError:
            return None

    def exists(self, name: str) -> bool:
        """Tell whether a file or directory exists."""
        return os.path.exists(self.path(name))

    def list(self, name: str) -> list[str]:
        """Return the names in a directory, sorted; none where it is missing."""
        try:
            return sorted(os.listdir(self.path(name)))
        except OSError:
            return []

    def real(self, name: str) -> str:
        """Return a name with its symbolic links resolved, again from the root; empty where it does not exist."""
        if not self.exists(name):
            return ""
        return os.path.relpath(os.path.realpath(self.path(name)), os.path.realpath(self.root))


@dataclass(frozen=True)
class NvidiaDriver:
    """The loaded NVIDIA kernel driver; `open_modules` is None where its kind is not told."""

    version: str
    open_modules: bool | None

    @property
    def branch(self) -> int:
        """Major number of the version, such as 580; 0 when it is not known."""
        match = re.match(r"\d+", self.version)
        return int(match[0]) if match else 0


@dataclass(frozen=True)
class CuFileConfig:
    """What matters in the configuration that libcufile reads, environment variables included.

    A switch is None where nothing sets it. `error` tells why the file could not be understood.
    """

    path: str | None = None
    allow_compat_mode: bool | None = None
    force_compat_mode: bool | None = None
    use_pci_p2pdma: bool | None = None
    nvme_p2pdma: bool | None = None
    raid_p2pdma: bool | None = None
    denied: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class Disk:
    """The block device below a file.

    Attributes
    ----------
    kind : str
        ``nvme``, ``raid``, ``dm``, ``virtio``, ``scsi``, ``loop``, ``memory``, ``network``, ``other``; ``none`` where
        the file system has no block device, or ``hidden`` where sysfs does not show it.
    layers : tuple of str
        Kernel names from the partition or volume down to the disks, such as ``("dm-0", "nvme0n1")``.
    detail : str
        The RAID level, the kind of the device-mapper volume, or the transport of an NVMe disk (``pcie``, ``tcp``).
    below : tuple of str
        Kinds of the disks at the bottom.
    pci : str
        PCI address of the first disk, or empty.
    numa_node : int
        NUMA node of the first disk; -1 when it is not told.
    """

    kind: str
    layers: tuple[str, ...] = ()
    detail: str = ""
    below: tuple[str, ...] = ()
    pci: str = ""
    numa_node: int = -1


@dataclass(frozen=True)
class GdsFacts:
    """All that the decision depends on, and all of it cheap to find out.

    Attributes
    ----------
    wsl : bool
        Whether this is the Windows Subsystem for Linux.
    driver : NvidiaDriver or None
        The NVIDIA driver.
    gpus : int
        GPUs that the kernel shows; those that are passed into a container, there.
    nvidia_fs : str or None
        Version of the loaded nvidia-fs module, empty if it does not tell, None if it is not loaded.
    nvidia_fs_nodes : int
        Number of ``/dev/nvidia-fs*`` nodes.
    kernel_p2pdma : bool or None
        Whether the kernel was built with ``CONFIG_PCI_P2PDMA``; None where it does not tell.
    config : CuFileConfig
        Configuration of libcufile.
    file_system : FileSystem
        Where the file is.
    device : str
        ``major:minor``.
    udev_record : bool
        Whether udev's record of the device is readable here and tells ``ID_FS_USAGE``.
    disk : Disk
        The block device.
    direct_io : DirectIO
        Whether ``O_DIRECT`` works.
    journal : str
        Data mode of an ext4 file system: ``ordered``, ``writeback``, ``journal`` or ``none``; empty where that is
        not told.
    """

    wsl: bool
    driver: NvidiaDriver | None
    gpus: int
    nvidia_fs: str | None
    nvidia_fs_nodes: int
    kernel_p2pdma: bool | None
    config: CuFileConfig
    file_system: FileSystem
    device: str
    udev_record: bool
    disk: Disk
    direct_io: DirectIO
    journal: str = ""


def is_wsl(tree: Tree) -> bool:
    """Tell whether this is the Windows Subsystem for Linux."""
    return "microsoft" in (tree.read("proc/version") or "").lower()


def nvidia_driver(tree: Tree) -> NvidiaDriver | None:
    """Return the loaded NVIDIA driver."""
    text = tree.read("proc/driver/nvidia/version")
    if text is None:
        return None
    # "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build ..."; the proprietary one says
    # "NVIDIA UNIX x86_64 Kernel Module  535.54.03 ...".
    first = text.partition("\n")[0]
    version = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", first + " ")
    kind = None if "Kernel Module" not in first else "Open Kernel Module" in first
    return NvidiaDriver(version[1] if version else "", kind)


def gpu_addresses(tree: Tree) -> tuple[str, ...]:
    """Return the PCI addresses of the GPUs, or the names of their device nodes where /proc does not list them."""
    listed = tree.list("proc/driver/nvidia/gpus")
    return tuple(listed or (name for name in tree.list("dev") if re.fullmatch(r"nvidia\d+", name)))


def nvidia_fs_version(tree: Tree) -> str | None:
    """Return the version of nvidia-fs, empty if it is loaded and does not tell, None if it is not loaded."""
    text = tree.read("proc/driver/nvidia-fs/version")
    if text is None:
        return "" if tree.exists("proc/driver/nvidia-fs") or tree.exists("sys/module/nvidia_fs") else None
    found = re.search(r"\d+(?:\.\d+)+", text)
    return found[0] if found else ""


def kernel_option(tree: Tree, option: str) -> bool | None:
    """Tell whether the running kernel was built with an option; None where no copy of its configuration is readable."""
    release = (tree.read("proc/sys/kernel/osrelease") or os.uname().release).strip()
    text: str | None = None
    try:
        with gzip.open(tree.path("proc/config.gz"), "rt", errors="replace") as file:
            text = file.read()
    except (OSError, EOFError, zlib.error):
        for name in (f"boot/config-{release}", f"lib/modules/{release}/config", f"lib/modules/{release}/build/.config"):
            text = text or tree.read(name)
    if not text:
        return None
    return re.search(rf"^{option}=[ym]$", text, re.MULTILINE) is not None


def udev_record(tree: Tree, device: str) -> bool:
    """Tell whether udev has a record of a device here with what libcufile asks for, ``ID_FS_USAGE``."""
    return "E:ID_FS_USAGE=" in (tree.read(f"run/udev/data/b{device}") or "")


_KINDS = (
    (r"nvme\d", "nvme"),
    (r"md\d", "raid"),
    (r"dm-\d", "dm"),
    (r"vd[a-z]", "virtio"),
    (r"(sd[a-z]|sr\d)", "scsi"),
    (r"loop\d", "loop"),
    (r"(zram|ram|pmem)\d", "memory"),
    (r"(nbd|rbd|drbd)\d", "network"),
)
_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def _kind(name: str) -> str:
    return next((kind for pattern, kind in _KINDS if re.match(pattern, name)), "other")


def disk_below(tree: Tree, device: str) -> Disk:
    """Follow a device down to its disks: partition, RAID, LVM or other mapping, disk."""
    if not device or device.startswith("0:"):
        return Disk("none")
    start = tree.real(f"sys/dev/block/{device}")
    if not start:
        return Disk("hidden")
    layers: dict[str, str] = {}
    bottom: list[str] = []
    todo = [start]
    while todo:
        place = todo.pop(0)
        if tree.exists(f"{place}/partition"):
            place = os.path.dirname(place)
        if os.path.basename(place) in layers:
            continue
        layers[os.path.basename(place)] = place
        below = [tree.real(f"{place}/slaves/{slave}") for slave in tree.list(f"{place}/slaves")]
        todo.extend(filter(None, below))
        if not below:
            bottom.append(place)
    # A mapping anywhere in the stack is what libcufile cannot see through.
    top = next((name for name in layers if _kind(name) == "dm"), next(iter(layers)))
    pci = next(filter(None, (_pci_address(tree, place) for place in bottom)), "")
    node = (tree.read(f"sys/bus/pci/devices/{pci}/numa_node") or "").strip() if pci else ""
    return Disk(
        kind=_kind(top),
        layers=tuple(layers),
        detail=_layer_detail(tree, layers[top], _kind(top)),
        below=tuple(dict.fromkeys(_kind(os.path.basename(place)) for place in bottom)),
        pci=pci,
        numa_node=int(node) if re.fullmatch(r"-?\d+", node) else -1,
    )


def _pci_address(tree: Tree, place: str) -> str:
    addresses = _PCI_ADDRESS.findall(place)
    if not addresses:
        # A disk with NVMe multipathing hangs from its subsystem, beside links to its controllers.
        above = os.path.dirname(place)
        controllers = (name for name in tree.list(above) if re.fullmatch(r"nvme\d+", name))
        addresses = [a for name in controllers for a in _PCI_ADDRESS.findall(tree.real(f"{above}/{name}"))]
    return addresses[-1] if addresses else ""


def _layer_detail(tree: Tree, place: str, kind: str) -> str:
    if kind == "raid":
        return (tree.read(f"{place}/md/level") or "").strip()
    if kind == "dm":
        # Everything after the first dash of the dm uuid identifies the volume, which nobody needs here.
        return (tree.read(f"{place}/dm/uuid") or "").partition("-")[0].strip()
    if kind == "nvme":
        return (tree.read(f"{place}/device/transport") or "").strip()
    return ""


def ext4_journal(tree: Tree, device: str, file_system: FileSystem) -> str:
    """Return the data mode of an ext4 file system, ``none`` without a journal; empty where it is not told."""
    if file_system.type != "ext4":
        return ""
    # The mount table leaves out what is a default of the kernel or of the file system itself; this file does not.
    name = os.path.basename(tree.real(f"sys/dev/block/{device}") or file_system.source)
    listed = tree.read(f"proc/fs/ext4/{name}/options")
    options = file_system.options if listed is None else tuple(listed.split())
    mode = next((option.removeprefix("data=") for option in options if option.startswith("data=")), "")
    return mode or ("none" if listed is not None else "")


_CONFIG = "etc/cufile.json"
_ENVIRONMENT = "CUFILE_ENV_PATH_JSON"


def cufile_config(tree: Tree, environment: dict[str, str] | None = None) -> CuFileConfig:
    """Read what matters of libcufile's configuration: ``CUFILE_ENV_PATH_JSON``, else ``/etc/cufile.json``."""
    environment = dict(os.environ) if environment is None else environment
    named = environment.get(_ENVIRONMENT)
    path = named or f"/{_CONFIG}"
    text: str | None
    if named:
        try:
            # Without O_NONBLOCK the open of a named pipe would wait for a writer.
            with open(os.open(named, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), errors="replace") as file:
                text = file.read()
        except OSError as exc:
            return CuFileConfig(path, error=f"cannot be read: {os.strerror(exc.errno or 0)}")
    else:
        text = tree.read(_CONFIG)
    error = ""
    document: Any = {}
    if text is not None:
        try:
            document = json.loads(_without_comments(text))
        except (ValueError, RecursionError) as exc:
            error = f"is not valid JSON: {exc}"
    properties, block = _section(document, "properties"), _section(document, "block")

    def switch(section: dict[str, Any], key: str, variable: str = "") -> bool | None:
        override = environment.get(variable, "").strip().lower()
        if override in ("true", "1", "false", "0"):
            return override in ("true", "1")
        value = section.get(key)
        return value if isinstance(value, bool) else None

    denylist = _section(document, "denylist")
    denied = tuple(str(item) for entries in denylist.values() if isinstance(entries, list) for item in entries)
    return CuFileConfig(
        path=path if text is not None else None,
        allow_compat_mode=switch(properties, "allow_compat_mode", "CUFILE_ALLOW_COMPAT_MODE"),
        force_compat_mode=switch(properties, "force_compat_mode", "CUFILE_FORCE_COMPAT_MODE"),
        use_pci_p2pdma=switch(properties, "use_pci_p2pdma", "CUFILE_USE_PCIP2PDMA"),
        nvme_p2pdma=switch(_section(block, "nvme"), "use_pci_p2pdma"),
        raid_p2pdma=switch(_section(block, "raid"), "use_pci_p2pdma"),
        denied=denied,
        error=error,
    )


def _section(document: Any, key: str) -> dict[str, Any]:
    value = document.get(key) if isinstance(document, dict) else None
    return value if isinstance(value, dict) else {}


def _without_comments(text: str) -> str:
    # NVIDIA ships cufile.json with // comments; a string is matched first, so that a // inside one stays.
    text = re.sub(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', lambda match: match[1] or "", text, flags=re.DOTALL)
    return re.sub(r",(\s*[}\]])", r"\1", text)


def device_number(status: os.stat_result, file_system: FileSystem) -> str:
    """Return ``major:minor`` of the device below a file."""
    number = status.st_dev
    # btrfs gives every subvolume an anonymous device number; the mount's source is the real one.
    if os.major(number) == 0 and file_system.source.startswith("/dev/"):
        try:
            source = os.stat(file_system.source)
        except OSError:
            pass
        else:
            if stat.S_ISBLK(source.st_mode):
                number = source.st_rdev
    return f"{os.major(number)}:{os.minor(number)}"


def gather(device: str, file_system: FileSystem, direct_io: DirectIO, tree: Tree | None = None) -> GdsFacts:
    """Collect the facts about this machine and a device."""
    tree = tree or Tree()
    return GdsFacts(
        wsl=is_wsl(tree),
        driver=nvidia_driver(tree),
        gpus=len(gpu_addresses(tree)),
        nvidia_fs=nvidia_fs_version(tree),
        nvidia_fs_nodes=sum(name.startswith("nvidia-fs") for name in tree.list("dev")),
        kernel_p2pdma=kernel_option(tree, "CONFIG_PCI_P2PDMA"),
        config=cufile_config(tree),
        file_system=file_system,
        device=device,
        udev_record=udev_record(tree, device),
        disk=disk_below(tree, device),
        direct_io=direct_io,
        journal=ext4_journal(tree, device, file_system),
    )
