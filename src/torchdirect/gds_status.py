"""Whether GPUDirect Storage is real for a file: DMA between disk and GPU, not cuFile's compatibility mode.

The kernel's own files answer "no" in well under a millisecond and without libcufile or CUDA; only when they have no
objection does a short-lived child process register the file with compatibility mode forbidden. The answer is kept per
file system, so later calls cost microseconds.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from torchdirect import system
from torchdirect.gds_facts import GdsFacts, device_number, gather
from torchdirect.system import DirectIO

if TYPE_CHECKING:
    from torchdirect.gds_proof import Proof

__all__ = ["GdsStatus", "Objection", "conclude", "gds_status", "judge", "objections", "p2pdma_objection", "reset"]

logger = logging.getLogger("torchdirect")


@dataclass(frozen=True)
class GdsStatus:
    """What cuFile would do with a file.

    Attributes
    ----------
    direct : bool
        Whether it moves the bytes by DMA between storage and GPU memory.
    compatible : bool
        Whether it can be used at all, if only in its compatibility mode. Where the facts alone settled that the path is
        not direct, this is their estimate: nothing was tried.
    reason : str
        How this is known, or why the path is not direct.
    remedy : str
        The one thing that would help; empty when direct.
    """

    direct: bool
    compatible: bool
    reason: str
    remedy: str


# ---------------------------------------------------------------------------------------------------------------------
# Decision
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Objection:
    """Why a file's bytes cannot move by DMA.

    Attributes
    ----------
    check : str
        What it is about, such as ``"udev"``.
    reason, remedy : str
        Why, and the one thing to do about it.
    fatal : bool
        Whether compatibility mode is out of the question too.
    """

    check: str
    reason: str
    remedy: str
    fatal: bool = False


# GDS file systems: local ones on NVMe, and distributed ones whose clients do RDMA to GPU memory.
_LOCAL = frozenset({"ext4", "xfs"})
_DISTRIBUTED = frozenset({"lustre", "wekafs", "nfs", "nfs4", "gpfs", "beegfs", "scatefs", "virtiofs"})
# These may register GPU memory through dma-buf, without nvidia-fs.
_OWN_RDMA = frozenset({"gpfs", "wekafs"})
_USE_HOST = "use a host transfer type (AUTO does)"
_NVMES = "keep the file on ext4 or xfs on a local NVMe disk"

#: First NVIDIA driver branch whose open kernel modules serve PCI P2PDMA ("GDS Support for NVMe", NVIDIA).
P2PDMA_BRANCH = 565


def p2pdma_objection(facts: GdsFacts) -> Objection | None:
    """Tell what rules out DMA by the kernel's PCI P2PDMA, the way without nvidia-fs; None if nothing is known to."""
    driver, config = facts.driver, facts.config
    if facts.file_system.type not in _LOCAL:
        return Objection("p2pdma", f"PCI P2PDMA serves local NVMe disks only, not {facts.file_system.type}", _NVMES)
    if facts.kernel_p2pdma is False:
        return Objection(
            "p2pdma",
            "the kernel was built without CONFIG_PCI_P2PDMA",
            "load nvidia-fs (modprobe nvidia-fs), or boot a kernel 6.2 or newer that has CONFIG_PCI_P2PDMA",
        )
    if driver is not None and driver.open_modules is False:
        return Objection(
            "p2pdma",
            "PCI P2PDMA needs NVIDIA's open kernel modules, and the proprietary ones are loaded",
            "install the open kernel modules (nvidia-open), or load nvidia-fs",
        )
    if driver is not None and 0 < driver.branch < P2PDMA_BRANCH:
        return Objection(
            "p2pdma",
            f"PCI P2PDMA needs NVIDIA driver {P2PDMA_BRANCH} or newer, and {driver.version} is loaded",
            f"install driver {P2PDMA_BRANCH} or newer with open kernel modules, or load nvidia-fs",
        )
    if not config.use_pci_p2pdma:
        return Objection(
            "p2pdma",
            "PCI P2PDMA is not switched on in libcufile's configuration",
            "set properties.use_pci_p2pdma to true in cufile.json, or load nvidia-fs",
        )
    if facts.disk.kind == "nvme" and config.nvme_p2pdma is False:
        return Objection(
            "p2pdma",
            "PCI P2PDMA is switched off for NVMe in libcufile's configuration",
            "set block.nvme.use_pci_p2pdma to true in cufile.json",
        )
    if facts.disk.kind == "nvme" and facts.disk.detail not in ("", "pcie"):
        reason = f"PCI P2PDMA serves local NVMe disks only, and this one is reached over {facts.disk.detail}"
        return Objection("p2pdma", reason, "load nvidia-fs (modprobe nvidia-fs)")
    # A known limitation of cuFile; whoever switches it on all the same may have a release without it.
    if facts.disk.kind == "raid" and not config.raid_p2pdma:
        return Objection("p2pdma", "PCI P2PDMA does not serve md RAID", "load nvidia-fs (modprobe nvidia-fs)")
    return None


def objections(facts: GdsFacts) -> tuple[Objection, ...]:
    """List everything that keeps a file's bytes from moving by DMA, the first cause first.

    Returns
    -------
    tuple of Objection
        Empty where the facts have no objection: then only a trial can tell.
    """
    found: list[Objection] = []
    for look in (_machine, _volume, _kernel_side, _configuration):
        found.extend(look(facts))
    return tuple(found)


def _machine(facts: GdsFacts) -> list[Objection]:
    if facts.wsl:
        reason = "this is WSL, which has no direct path, and where libcufile can end the process"
        return [Objection("wsl", reason, f"use native Linux; here, {_USE_HOST}", fatal=True)]
    if facts.driver is None and not facts.gpus:
        remedy = "install the NVIDIA driver; in a container, pass the GPU in (docker run --gpus all)"
        return [Objection("gpu", "no NVIDIA GPU or driver is visible here", remedy, fatal=True)]
    if not facts.gpus:
        remedy = "pass a GPU into the container (docker run --gpus all), and check nvidia-smi"
        return [Objection("gpu", "the NVIDIA driver is loaded, but it shows no GPU here", remedy, fatal=True)]
    return []


def _volume(facts: GdsFacts) -> list[Objection]:
    kind, disk = facts.file_system.type, facts.disk
    found: list[Objection] = []
    if kind == "overlay":
        remedy = "keep the file on a bind mount or volume (docker run -v /data:/data), not in the container's own layer"
        return [Objection("file-system", "the file is on an overlay, whose disk libcufile cannot find", remedy, True)]
    if facts.file_system.in_memory:
        return [Objection("file-system", f"{kind} keeps its files in memory: there is no disk", _NVMES, True)]
    local = kind in _LOCAL
    if not local and kind not in _DISTRIBUTED:
        found.append(Objection("file-system", f"GPUDirect Storage does not support {kind}", _NVMES))
    if kind.startswith("nfs") and "proto=rdma" not in facts.file_system.options:
        found.append(
            Objection("file-system", "NFS runs over TCP here", "mount it over RDMA (-o proto=rdma,port=20049)")
        )
    if kind == "ext4" and facts.journal in ("writeback", "journal"):
        reason = f"ext4 is mounted with data={facts.journal}, and GPUDirect Storage needs data=ordered"
        found.append(Objection("file-system", reason, "mount it with data=ordered, ext4's default"))
    if local or disk.kind not in ("none", "hidden"):
        if not facts.udev_record:
            reason = f"udev has no record of the disk here: /run/udev/data/b{facts.device} is missing or incomplete"
            remedy = "in a container, mount the host's udev data (docker run -v /run/udev:/run/udev:ro)"
            found.append(Objection("udev", reason, remedy, fatal=True))
        found.extend(_block_device(facts))
    if not facts.direct_io.supported:
        found.append(Objection("direct-io", f"O_DIRECT does not work: {facts.direct_io.reason}", _NVMES))
    return found


_DM = {"LVM": "LVM", "CRYPT": "dm-crypt", "mpath": "multipath"}
# What libcufile has no driver for. Of others, such as SCSI, nvidia-fs serves some, so with it the trial must tell.
_NEVER = frozenset({"virtio", "loop", "memory", "network"})


def _block_device(facts: GdsFacts) -> list[Objection]:
    disk = facts.disk
    if disk.kind == "nvme" and disk.detail == "tcp":
        return [Objection("disk", f"the disk {disk.layers[-1]} is reached over TCP", "connect it over RDMA")]
    if disk.kind in ("nvme", "hidden", "none"):
        return []
    if disk.kind == "dm":
        name = _DM.get(disk.detail, "device-mapper")
        reason = f"the file system is on {name} ({' on '.join(disk.layers[:3])}), which GPUDirect Storage cannot pass"
        return [Objection("disk", reason, "put the file system straight on an NVMe disk or on md RAID 0 of NVMe disks")]
    if disk.kind == "raid":
        if disk.detail not in ("", "raid0") or (disk.below and disk.below != ("nvme",)):
            reason = f"the file system is on md {disk.detail or 'RAID'} of {'/'.join(disk.below)} disks"
            return [Objection("disk", reason, "use md RAID 0 of NVMe disks, or one NVMe disk")]
        return []
    if disk.kind not in _NEVER and facts.nvidia_fs is not None:
        return []
    kind = f" but {disk.kind}" if disk.kind != "other" else ""
    return [Objection("disk", f"the disk {disk.layers[-1]} is no NVMe device{kind}", _NVMES)]


def _kernel_side(facts: GdsFacts) -> list[Objection]:
    if facts.nvidia_fs is not None:
        if facts.nvidia_fs_nodes:
            return []
        reason = "nvidia-fs is loaded, but its device nodes /dev/nvidia-fs* are missing here"
        remedy = "pass /dev/nvidia-fs* into the container (docker run --device /dev/nvidia-fs0 ...)"
        return [Objection("nvidia-fs", reason, remedy, fatal=True)]
    if facts.file_system.type in _OWN_RDMA:
        return []
    if facts.file_system.type not in _LOCAL:
        return [Objection("nvidia-fs", "nvidia-fs is not loaded", "load nvidia-fs (modprobe nvidia-fs)")]
    p2pdma = p2pdma_objection(facts)
    if p2pdma is None:
        return []
    return [Objection("nvidia-fs", f"nvidia-fs is not loaded, and {p2pdma.reason}", p2pdma.remedy)]


def _configuration(facts: GdsFacts) -> list[Objection]:
    config = facts.config
    found = []
    if config.force_compat_mode:
        reason = "libcufile's configuration forces compatibility mode"
        found.append(Objection("config", reason, "set force_compat_mode to false (or unset CUFILE_FORCE_COMPAT_MODE)"))
    names = {facts.file_system.type, facts.file_system.mount_point, facts.file_system.source, facts.disk.kind}
    names.update(f"/dev/{layer}" for layer in facts.disk.layers)
    if names & set(config.denied):
        remedy = "remove it from the denylist in cufile.json"
        found.append(Objection("config", "the denylist in cufile.json names this file system or disk", remedy))
    return found


def judge(facts: GdsFacts) -> GdsStatus | None:
    """Decide by the facts alone; None where they have no objection, so that only a trial can tell."""
    found = objections(facts)
    return _verdict(facts, found) if found else None


def _verdict(facts: GdsFacts, found: tuple[Objection, ...]) -> GdsStatus:
    fatal = next((objection for objection in found if objection.fatal), None)
    compatible = fatal is None and facts.config.allow_compat_mode is not False
    first = fatal or found[0]
    return GdsStatus(False, compatible, first.reason, first.remedy)


def conclude(facts: GdsFacts, strict: Proof) -> GdsStatus:
    """Decide by a trial with compatibility mode forbidden, which ran after the facts had no objection."""
    allowed = facts.config.allow_compat_mode is not False
    if strict.ok and strict.forbade_compatibility:
        moved = "read" if any(transfer.ok for transfer in strict.transfers) else "registered"
        return GdsStatus(True, allowed, f"cuFile {moved} the file with compatibility mode forbidden", "")
    if strict.ok:
        # Too old for the parameter: then the kernel driver's own version is the sign that it takes part.
        if strict.nvfs_version != (0, 0):
            return GdsStatus(True, allowed, "cuFile registered the file, and its driver runs on nvidia-fs", "")
        reason = "this libcufile cannot forbid compatibility mode, and nvidia-fs takes no part"
        return GdsStatus(False, allowed, reason, "install a newer libcufile")
    if strict.forbade_compatibility and strict.refused and not strict.driver_opened:
        reason = "the cuFile driver does not open without compatibility mode: nothing in the kernel serves it"
        return GdsStatus(False, allowed, reason, "load nvidia-fs (modprobe nvidia-fs), or switch PCI P2PDMA on")
    # The trial comes after a probe that opens the driver as it is configured: where even that failed, nothing works.
    return GdsStatus(False, allowed and strict.driver_opened, strict.reason, strict.remedy or _USE_HOST)


# ---------------------------------------------------------------------------------------------------------------------
# The cached answer
# ---------------------------------------------------------------------------------------------------------------------

_lock = threading.Lock()
# By device number and type: on some kernels the files of an overlay have the device number of the layer below it.
_answers: dict[tuple[int, str], GdsStatus] = {}

# A CUDA context and a buffer take a few hundred MiB; on a GPU with less to spare the trial only registers the file.
_SPARE_BYTES = 2 << 30


def _after_fork_in_child() -> None:
    # Another thread of the parent may have held the lock, and nobody here would release it.
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)


def reset() -> None:
    """Forget all answers; for tests, and after the machine was changed."""
    with _lock:
        _answers.clear()


def gds_status(path_or_fd: system.PathOrFd) -> GdsStatus:
    """Tell whether GPUDirect Storage is real for a file: the question that ``AUTO`` asks.

    Parameters
    ----------
    path_or_fd : path or int
        A file or directory, or a descriptor. A path that does not exist stands for its nearest existing parent.

    Returns
    -------
    GdsStatus
        Never raises. The first call per file system reads some small files of the kernel (milliseconds), and only if
        they have no objection does it try cuFile in child processes (seconds, and about a minute if CUDA hangs). Later
        calls cost microseconds.
    """
    try:
        place, status = _existing(path_or_fd)
        key = status.st_dev, system.file_system_type(place)
        found = _answers.get(key)
        if found is not None:
            return found
        with _lock:
            if key not in _answers:
                answer, lasting = _find_out(place, status)
                if not lasting:
                    return answer
                _answers[key] = answer
            return _answers[key]
    except OSError as error:
        reason = f"the file cannot be looked up: {error.strerror or error}"
        return GdsStatus(False, False, reason, "name a file that exists and may be read")
    except Exception as error:
        # A wrong answer costs a slower path, an exception would cost the caller the checkpoint.
        logger.warning("whether GPUDirect Storage is real could not be found out", exc_info=True)
        reason = f"it could not be found out: {type(error).__name__}: {error}"
        return GdsStatus(False, False, reason, f"report this; until then, {_USE_HOST}")


def _existing(path_or_fd: system.PathOrFd) -> tuple[str | int, os.stat_result]:
    if isinstance(path_or_fd, int):
        return path_or_fd, os.fstat(path_or_fd)
    place = os.path.realpath(os.fsdecode(path_or_fd))
    while True:
        try:
            return place, os.stat(place)
        except FileNotFoundError:
            parent = os.path.dirname(place)
            if parent == place:
                raise
            place = parent


def _try(place: str | int) -> Proof:
    # One GPU at most, and the one that this process works on anyway: with one process per GPU every process asks.
    gpu: int | Literal["none"] = "none"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        current = torch.cuda.current_device()
        if torch.cuda.mem_get_info(current)[0] >= _SPARE_BYTES:
            gpu = current
    from torchdirect.gds_proof import prove  # here, as it needs the binding of libcufile and few machines get this far

    return prove(place, gpu=gpu)


def _find_out(place: str | int, status: os.stat_result) -> tuple[GdsStatus, bool]:
    """Return the answer, and whether it holds for the other files of the file system too."""
    file_system = system.file_system(f"/proc/self/fd/{place}" if isinstance(place, int) else place)
    try:
        direct_io = system.direct_io(place)
    except OSError as error:
        direct_io = DirectIO(False, 1, 1, os.strerror(error.errno or 0))
    facts = gather(device_number(status, file_system), file_system, direct_io)
    found = objections(facts)
    if found:
        # Single files can lack O_DIRECT, such as encrypted ones.
        return _verdict(facts, found), {objection.check for objection in found} != {"direct-io"}
    return conclude(facts, _try(place)), True
