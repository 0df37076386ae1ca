"""What the doctor looks at beyond the facts that `torchdirect.gds_status` decides by."""

from __future__ import annotations

import os
import re
import resource
import shutil
import warnings
from dataclasses import dataclass

import torch

from torchdirect import system
from torchdirect.cufile import child, library
from torchdirect.cufile.errors import CuFileError, CuFileNotFoundError, CuFileUnavailableError, cuda_error_name
from torchdirect.gds_facts import GdsFacts, Tree, device_number, gather, gpu_addresses
from torchdirect.system import DirectIO

__all__ = ["Facts", "Gpu", "LibCuFile", "gather_facts", "gpus", "gpus_of_torch"]


@dataclass(frozen=True)
class Gpu:
    """A GPU: index in CUDA's order where `usable`, PCI address, BAR1 size in bytes and NUMA node (-1: not told)."""

    index: int
    name: str
    pci: str
    bar1_bytes: int | None
    numa_node: int
    usable: bool


@dataclass(frozen=True)
class CudaFault:
    """Why CUDA does not start, and what helps."""

    reason: str
    remedy: str


@dataclass(frozen=True)
class LibCuFile:
    """The libcufile that was found: file, way it was found, version; or why there is none."""

    path: str = ""
    source: str = ""
    version: str = ""
    reason: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Facts:
    """Everything that the checks judge.

    Attributes
    ----------
    gds : GdsFacts
        What the decision about GPUDirect Storage depends on.
    kernel : str
        Release of the kernel.
    machine : str
        Architecture, such as ``x86_64``.
    gpus : tuple of Gpu
        All GPUs.
    cuda_fault : CudaFault or None
        Why CUDA does not start; None if it does, or was not asked.
    torch_cuda : str
        The CUDA version that torch was built for; empty for a CPU build.
    libcufile : LibCuFile
        The library.
    registry : dict
        NVIDIA driver registry parameters that have to do with peer-to-peer transfers.
    nvidia_fs_stats : tuple of str
        The lines of nvidia-fs' statistics about active use and errors.
    nvme_multipath : bool or None
        Whether the kernel's NVMe multipathing is on; None without the nvme module.
    iommu : str
        ``none``, ``passthrough`` or ``translating``.
    iommu_options : tuple of str
        The options of the kernel command line about it.
    numa_distance : dict
        GPU index to the distance between its node and the disk's; 10 is the same node.
    memlock : int or None
        Bytes that this process may lock; None for no limit.
    container : str
        Kind of container, or empty.
    writable : bool
        Whether files may be made beside the path.
    """

    gds: GdsFacts
    kernel: str
    machine: str
    gpus: tuple[Gpu, ...]
    cuda_fault: CudaFault | None
    torch_cuda: str
    libcufile: LibCuFile
    registry: dict[str, str]
    nvidia_fs_stats: tuple[str, ...]
    nvme_multipath: bool | None
    iommu: str
    iommu_options: tuple[str, ...]
    numa_distance: dict[int, int]
    memlock: int | None
    container: str
    writable: bool


def gather_facts(path: str, tree: Tree | None = None, gpu_list: tuple[Gpu, ...] | None = None) -> Facts:
    """Collect all facts for a path that exists.

    Parameters
    ----------
    path : str
        File or directory.
    tree : Tree, optional
        Where the kernel's files are; another root in tests.
    gpu_list : tuple of Gpu, optional
        The GPUs, where the caller knows them.
    """
    tree = tree or Tree()
    file_system = system.file_system(path)
    status = os.stat(path)
    try:
        direct_io = system.direct_io(path)
    except OSError as error:
        direct_io = DirectIO(False, 1, 1, os.strerror(error.errno or 0))
    gds = gather(device_number(status, file_system), file_system, direct_io, tree)
    fault = cuda_fault() if gpu_list is None and tree.root == "/" else None
    cards = gpus(tree, ask_torch=fault is None) if gpu_list is None else gpu_list
    options = iommu_options(tree)
    directory = path if os.path.isdir(path) else os.path.dirname(path)
    return Facts(
        gds=gds,
        kernel=(tree.read("proc/sys/kernel/osrelease") or os.uname().release).strip(),
        machine=os.uname().machine,
        gpus=cards,
        cuda_fault=fault,
        torch_cuda=torch.version.cuda or "",
        libcufile=libcufile(ask=not gds.wsl),
        registry=driver_registry(tree),
        nvidia_fs_stats=nvidia_fs_stats(tree),
        nvme_multipath=nvme_multipath(tree),
        iommu=iommu(tree, (gds.disk.pci, *(card.pci for card in cards)), options),
        iommu_options=options,
        numa_distance=numa_distances(tree, cards, gds.disk.numa_node),
        memlock=memlock(),
        container=container(tree),
        writable=os.access(directory, os.W_OK | os.X_OK),
    )


# ---------------------------------------------------------------------------------------------------------------------
# GPUs
# ---------------------------------------------------------------------------------------------------------------------


_CUDA_REMEDIES = {
    100: "check CUDA_VISIBLE_DEVICES, and that the container got the GPU",
    802: "start nvidia-fabricmanager, which machines with NVSwitch need",
    803: "reboot: the NVIDIA driver in the kernel and its libraries are of different versions",
    804: "install a newer NVIDIA driver, or a torch that is built for an older CUDA",
}


def cuda_fault(timeout: float = 20.0) -> CudaFault | None:
    """Tell why CUDA does not start, by trying it in a child process; None if it does, or if torch has no CUDA.

    A GPU that has fallen off the bus can hang whoever starts CUDA.
    """
    if not torch.version.cuda:
        return None
    try:
        ended = child.python("import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))", [], timeout)
    except OSError:
        return None
    if ended.returncode is None:
        return CudaFault(f"CUDA does not start within {timeout:g} seconds", "see dmesg for Xid errors, and reboot")
    if b"OSError" in ended.stderr:
        # No libcuda at all: then there is no driver either, and the finding about that says so.
        return None
    code = int(ended.stdout) if ended.stdout.strip().isdigit() else -1
    if code < 0:
        return CudaFault("CUDA ends the process that starts it", "check that nvidia-smi answers, and see dmesg")
    if code:
        reason = f"CUDA does not start: {cuda_error_name(code)} ({code})"
        return CudaFault(reason, _CUDA_REMEDIES.get(code, "check that nvidia-smi answers, and see dmesg"))
    return None


_Card = tuple[int, str, str, bool]


def gpus(tree: Tree, *, ask_torch: bool = True) -> tuple[Gpu, ...]:
    """List GPUs as torch numbers them, or as /proc shows them where torch cannot use them."""
    live = tree.root == "/"
    cards = (gpus_of_torch() if live and ask_torch else ()) or _gpus_of_proc(tree)
    sizes = _bar1_of_nvidia_smi() if live and cards else {}
    return tuple(
        Gpu(index, name, pci, sizes.get(pci) or bar1_of_sysfs(tree, pci), _node(tree, pci), usable)
        for index, name, pci, usable in cards
    )


def gpus_of_torch() -> tuple[_Card, ...]:
    """Return index, name, PCI address and True for every GPU that torch can use."""
    try:
        with warnings.catch_warnings():
            # torch warns where the driver does not suit it; the report says that in its own words.
            warnings.simplefilter("ignore")
            if not torch.cuda.is_available():
                return ()
        cards = []
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            parts = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
            told = [part for part in parts if isinstance(part, int)]
            pci = "{:04x}:{:02x}:{:02x}.0".format(*told) if len(told) == 3 else ""
            cards.append((index, str(properties.name), pci, True))
        return tuple(cards)
    except (RuntimeError, AssertionError):
        # A driver that is too old or a GPU that fell off the bus: then /proc is all there is.
        return ()


def _gpus_of_proc(tree: Tree) -> tuple[_Card, ...]:
    cards = []
    for index, address in enumerate(gpu_addresses(tree)):
        text = tree.read(f"proc/driver/nvidia/gpus/{address}/information") or ""
        model = re.search(r"^Model:\s*(.+)$", text, re.MULTILINE)
        cards.append((index, model[1].strip() if model else "NVIDIA GPU", address if ":" in address else "", False))
    return tuple(cards)


def _node(tree: Tree, pci: str) -> int:
    text = (tree.read(f"sys/bus/pci/devices/{pci}/numa_node") or "").strip() if pci else ""
    return int(text) if re.fullmatch(r"-?\d+", text) else -1


def bar1_of_sysfs(tree: Tree, pci: str) -> int | None:
    """Return the size of a GPU's BAR1 window in bytes by its PCI resources; None where they are not shown."""
    lines = (tree.read(f"sys/bus/pci/devices/{pci}/resource") or "").splitlines() if pci else []
    # One "start end flags" line per region. A 64-bit BAR takes two lines, and BAR0 (registers) has 32 bits on older and
    # 64 bits on newer GPUs: BAR1 is the first prefetchable memory region (flags bit 0x2000).
    for line in lines[1:6]:
        fields = re.fullmatch(r"0x([0-9a-f]+) 0x([0-9a-f]+) 0x([0-9a-f]+)", line.strip())
        if fields is None:
            continue
        start, end, flags = (int(field, 16) for field in fields.groups())
        if end and flags & 0x2000:
            return end - start + 1
    return None


def _bar1_of_nvidia_smi() -> dict[str, int]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return {}
    try:
        return parse_bar1(child.run([command, "-q", "-d", "MEMORY"], timeout=20.0).stdout.decode(errors="replace"))
    except OSError:
        return {}


def parse_bar1(text: str) -> dict[str, int]:
    """Read BAR1 sizes in bytes, by PCI address, from the output of ``nvidia-smi -q -d MEMORY``."""
    sizes = {}
    for address, body in re.findall(r"^GPU ([0-9A-Fa-f:.]+)$(.*?)(?=^GPU |\Z)", text, re.MULTILINE | re.DOTALL):
        total = re.search(r"BAR1 Memory Usage\s*\n\s*Total\s*:\s*(\d+) MiB", body)
        if total:
            domain, _, rest = address.lower().partition(":")
            sizes[f"{int(domain, 16):04x}:{rest}"] = int(total[1]) << 20
    return sizes


# ---------------------------------------------------------------------------------------------------------------------
# NVIDIA software
# ---------------------------------------------------------------------------------------------------------------------


def libcufile(*, ask: bool = True) -> LibCuFile:
    """Find libcufile; its version is that of the file's own name, else, with `ask`, what the loaded library says."""
    try:
        report = library.search()
    except CuFileUnavailableError as error:
        return LibCuFile(reason=error.reason, remedy=error.remedy)
    if report.location is None:
        remedy = "install the CUDA toolkit or 'pip install nvidia-cufile'"
        return LibCuFile(reason=f"not found in {len(report.looked_at)} places", remedy=remedy)
    path = report.location.path
    match = re.search(r"libcufile\.so\.(\d+\.\d+(?:\.\d+)?)$", os.path.realpath(path))
    version = match[1] if match else ""
    if ask and not version:
        try:
            version = str(library.load().version())
        except (CuFileError, CuFileUnavailableError) as error:
            if isinstance(error, CuFileNotFoundError):
                return LibCuFile(reason=error.reason, remedy=error.remedy)
    return LibCuFile(path, report.location.source, version)


#: Registry keys that decide about direct transfers; the others are nobody's business in a bug report.
_REGISTRY = (
    "RMForceStaticBar1",
    "RmForceDisableIomapWC",
    "ForceP2P",
    "GrdmaPciTopoCheckOverride",
    "PeerMappingOverride",
    "EnableResizableBar",
    "DmaRemapPeerMmio",
)


def driver_registry(tree: Tree) -> dict[str, str]:
    """Return the peer-to-peer parameters of the loaded NVIDIA driver, on their own lines or in ``RegistryDwords``."""
    text = tree.read("proc/driver/nvidia/params") or ""
    return {
        key: match[1] for key in _REGISTRY if (match := re.search(rf"\b{key}\s*[:=]\s*\"?(\w+)", text, re.IGNORECASE))
    }


def nvidia_fs_stats(tree: Tree) -> tuple[str, ...]:
    """Return the lines of nvidia-fs' statistics about reads, writes and errors, with single spaces."""
    lines = (" ".join(line.split()) for line in (tree.read("proc/driver/nvidia-fs/stats") or "").splitlines())
    # Not the lines of single GPUs, which carry their UUIDs.
    return tuple(line for line in lines if re.match(r"(IO stats|Reads|Writes|Error|Ops|Active)\b", line))[:10]


# ---------------------------------------------------------------------------------------------------------------------
# Kernel and process
# ---------------------------------------------------------------------------------------------------------------------


def nvme_multipath(tree: Tree) -> bool | None:
    """Tell whether the kernel's NVMe multipathing is on."""
    text = tree.read("sys/module/nvme_core/parameters/multipath")
    return None if text is None else text.strip() in ("Y", "1")


def iommu_options(tree: Tree) -> tuple[str, ...]:
    """Return the kernel's command line options about the IOMMU and nothing else of it."""
    words = (tree.read("proc/cmdline") or "").split()
    return tuple(word for word in words if re.match(r"(intel_iommu|amd_iommu|iommu|iommu\.\w+)=", word))


def iommu(tree: Tree, devices: tuple[str, ...], options: tuple[str, ...]) -> str:
    """Return what the IOMMU does to the DMA of some PCI devices: ``none``, ``passthrough`` or ``translating``."""
    if not tree.list("sys/class/iommu") and not tree.list("sys/kernel/iommu_groups"):
        return "none"
    # "identity" passes addresses through, "DMA" and "DMA-FQ" translate (ABI/testing/sysfs-kernel-iommu_groups).
    groups = [tree.read(f"sys/bus/pci/devices/{pci}/iommu_group/type") for pci in devices if pci]
    kinds = {group.strip() for group in groups if group}
    if kinds:
        return "passthrough" if kinds == {"identity"} else "translating"
    return "passthrough" if {"iommu=pt", "iommu.passthrough=1"} & set(options) else "translating"


def numa_distances(tree: Tree, cards: tuple[Gpu, ...], disk_node: int) -> dict[int, int]:
    """Return the distance between each GPU's NUMA node and the disk's, where both are told."""
    distances = {}
    nodes = sorted(int(n[4:]) for n in tree.list("sys/devices/system/node") if re.fullmatch(r"node\d+", n))
    for card in cards:
        if card.numa_node < 0 or disk_node not in nodes:
            continue
        row = (tree.read(f"sys/devices/system/node/node{card.numa_node}/distance") or "").split()
        # One number per online node, in the order of their numbers.
        if len(row) == len(nodes) and row[nodes.index(disk_node)].isdigit():
            distances[card.index] = int(row[nodes.index(disk_node)])
    return distances


def memlock() -> int | None:
    """Return how many bytes this process may lock in memory; None for no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def container(tree: Tree) -> str:
    """Return which kind of container this process is in, or an empty text."""
    if tree.exists("var/run/secrets/kubernetes.io") or tree.exists("run/secrets/kubernetes.io"):
        return "Kubernetes"
    if tree.exists("run/.containerenv"):
        return "Podman"
    if tree.exists(".dockerenv"):
        return "Docker"
    groups = (tree.read("proc/1/cgroup") or "") + (tree.read("proc/self/cgroup") or "")
    for mark, name in (
        ("kubepods", "Kubernetes"),
        ("docker", "Docker"),
        ("libpod", "Podman"),
        ("containerd", "containerd"),
        ("lxc", "LXC"),
    ):
        if mark in groups:
            return name
    return ""
