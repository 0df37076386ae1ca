"""The doctor's judgement: facts and trials in, findings and verdicts out. Nothing here looks at the machine."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass

from torchdirect.cufile.structs import DriverStatus
from torchdirect.doctor.facts import Facts, Gpu
from torchdirect.doctor.report import Finding, Level, Quality, TransferVerdict
from torchdirect.gds_proof import Proof
from torchdirect.gds_status import GdsStatus, conclude, judge, objections, p2pdma_objection
from torchdirect.transfer import TransferType

__all__ = ["Trials", "findings", "shown_options", "verdicts"]

_GIB = 1 << 30


@dataclass(frozen=True)
class Trials:
    """The two trials of cuFile: with compatibility mode forbidden, and allowed; None where it was not tried."""

    strict: Proof | None = None
    lenient: Proof | None = None


# ---------------------------------------------------------------------------------------------------------------------
# Findings
# ---------------------------------------------------------------------------------------------------------------------


def findings(facts: Facts, trials: Trials) -> tuple[Finding, ...]:
    """Judge everything that was looked at, in the order in which a reader would look.

    A check gives one finding for each cause that it knows to be in the way, else one or none that says how things are.
    """
    objected = objections(facts.gds)
    found: list[Finding] = []
    for check, look in _CHECKS:
        in_the_way = [Finding(check, Level.PROBLEM, o.reason, o.remedy) for o in objected if o.check == check]
        finding = None if in_the_way else look(facts, trials)
        found += in_the_way or ([finding] if finding is not None else [])
    return tuple(found)


def _wsl(facts: Facts, trials: Trials) -> Finding | None:
    return None


def _container(facts: Facts, trials: Trials) -> Finding | None:
    return Finding("container", Level.OK, f"{facts.container} container" if facts.container else "not in a container")


def _gpu(facts: Facts, trials: Trials) -> Finding | None:
    if not facts.gpus:
        return None
    names: dict[str, int] = {}
    for gpu in facts.gpus:
        names[gpu.name] = names.get(gpu.name, 0) + 1
    text = ", ".join(f"{count} x {name}" for name, count in names.items())
    if all(gpu.usable for gpu in facts.gpus):
        return Finding("gpu", Level.OK, text)
    reason, remedy = _unusable(facts)
    return Finding("gpu", Level.PROBLEM, f"{text}: {reason}", remedy)


def _unusable(facts: Facts) -> tuple[str, str]:
    """Return why torch cannot use the GPUs, and what helps."""
    if facts.cuda_fault is not None:
        return facts.cuda_fault.reason, facts.cuda_fault.remedy
    if not facts.torch_cuda:
        return "this torch is a CPU build, which uses no GPU", "install a CUDA build of torch"
    driver = facts.gds.driver.version if facts.gds.driver is not None else ""
    reason = f"torch, built for CUDA {facts.torch_cuda}, cannot use the GPU with NVIDIA driver {driver}".rstrip()
    return reason, "install a newer NVIDIA driver, or a torch that is built for an older CUDA"


def _driver(facts: Facts, trials: Trials) -> Finding | None:
    driver = facts.gds.driver
    if driver is None:
        return None
    kinds = {True: "open kernel modules", False: "proprietary kernel modules", None: "kind of modules not told"}
    text = f"NVIDIA driver {driver.version or '(unknown version)'}, {kinds[driver.open_modules]}"
    if driver.open_modules is False:
        remedy = "install the open kernel modules (nvidia-open): PCI P2PDMA and new releases of nvidia-fs need them"
        return Finding("driver", Level.NOTE, text, remedy)
    return Finding("driver", Level.OK, text)


def _bar1(facts: Facts, trials: Trials) -> Finding | None:
    sizes = sorted({gpu.bar1_bytes for gpu in facts.gpus if gpu.bar1_bytes})
    if not sizes:
        return None
    text = "BAR1 of " + ", ".join(f"{s / _GIB:g} GiB" if s >= _GIB else f"{s >> 20} MiB" for s in sizes)
    if sizes[0] < _GIB:
        remedy = "enable resizable BAR in the firmware, where the GPU has it"
        return Finding("bar1", Level.NOTE, f"{text}: only so much GPU memory can be registered", remedy)
    return Finding("bar1", Level.OK, text)


_SOURCES = {
    "environment": "named by TORCHDIRECT_LIBCUFILE",
    "loaded": "loaded in this process",
    "loader": "from the system's library path",
    "toolkit": "from the CUDA toolkit",
    "pip": "from a pip package",
}


def _libcufile(facts: Facts, trials: Trials) -> Finding | None:
    found = facts.libcufile
    if not found.path:
        return Finding("libcufile", Level.PROBLEM, f"no libcufile: {found.reason}", found.remedy)
    version = f"libcufile {found.version}" if found.version else "libcufile (unknown version)"
    return Finding("libcufile", Level.OK, f"{version}, {_SOURCES.get(found.source, found.source)}")


def _config(facts: Facts, trials: Trials) -> Finding | None:
    config = facts.gds.config
    if config.error:
        reason = f"{config.path} {config.error}"
        return Finding("config", Level.PROBLEM, reason, "repair the file, or unset CUFILE_ENV_PATH_JSON")
    switches = (
        ("allow_compat_mode", config.allow_compat_mode),
        ("force_compat_mode", config.force_compat_mode),
        ("use_pci_p2pdma", config.use_pci_p2pdma),
        ("block.nvme.use_pci_p2pdma", config.nvme_p2pdma),
        ("block.raid.use_pci_p2pdma", config.raid_p2pdma),
    )
    shown = ", ".join(f"{name} {str(value).lower()}" for name, value in switches if value is not None)
    text = config.path or "no cufile.json, so libcufile's defaults"
    text = f"{text}: {shown}" if shown else text
    if config.allow_compat_mode is False:
        remedy = "set allow_compat_mode to true if cuFile shall work without a direct path"
        return Finding("config", Level.NOTE, text, remedy)
    return Finding("config", Level.OK, text)


def _nvidia_fs(facts: Facts, trials: Trials) -> Finding | None:
    version = facts.gds.nvidia_fs
    if version is None:
        return None
    text = f"nvidia-fs {version or '(unknown version)'} is loaded"
    # "Reads : err=0 io_state_err=0"; every counter in the line "Error : ..." counts faults.
    errors = [
        f"{line.partition(':')[0].strip()} {name}={count}"
        for line in facts.nvidia_fs_stats
        for name, count in re.findall(r"([\w-]+)=(\d+)", line)
        if int(count) and (line.startswith("Error") or name.endswith("err"))
    ]
    if errors:
        return Finding("nvidia-fs", Level.NOTE, f"{text} and has counted faults: {', '.join(errors)}", "see dmesg")
    if any(line.startswith("IO stats: Enabled") for line in facts.nvidia_fs_stats):
        text += " and counts transfers"
    return Finding("nvidia-fs", Level.OK, text)


def _p2pdma(facts: Facts, trials: Trials) -> Finding | None:
    objection = p2pdma_objection(facts.gds)
    if objection is not None:
        # In the way only without nvidia-fs, and then the finding about nvidia-fs says so.
        if facts.gds.nvidia_fs is None:
            return None
        return Finding("p2pdma", Level.OK, f"not needed with nvidia-fs: {objection.reason}")
    if facts.nvme_multipath:
        text = "PCI P2PDMA is switched on, but the kernel's NVMe multipathing is too, which keeps it from working"
        level = Level.PROBLEM if facts.gds.nvidia_fs is None else Level.NOTE
        return Finding("p2pdma", level, text, "load nvme_core with multipath=N (options nvme_core multipath=N)")
    if facts.machine == "x86_64" and facts.gds.driver is not None and facts.registry.get("RMForceStaticBar1") != "1":
        text = "PCI P2PDMA is switched on, but the driver parameter RMForceStaticBar1=1, which it needs, is not set"
        remedy = 'load nvidia with NVreg_RegistryDwords="RMForceStaticBar1=1;RmForceDisableIomapWC=1;"'
        return Finding("p2pdma", Level.NOTE, text, remedy)
    kernel = "" if facts.gds.kernel_p2pdma else "; whether the kernel has CONFIG_PCI_P2PDMA is not told here"
    return Finding("p2pdma", Level.OK, f"PCI P2PDMA is switched on{kernel}")


def _iommu(facts: Facts, trials: Trials) -> Finding | None:
    if facts.iommu == "none":
        return Finding("iommu", Level.OK, "no IOMMU translates addresses")
    if facts.iommu == "passthrough":
        return Finding("iommu", Level.OK, "the IOMMU passes addresses through")
    text = "an IOMMU translates addresses"
    # Machines with Grace processors want it that way (NVIDIA's best practices guide).
    if facts.machine != "x86_64":
        return Finding("iommu", Level.OK, text)
    text += ", which slows direct transfers down or stops them"
    return Finding("iommu", Level.NOTE, text, "boot with iommu=pt, or switch the IOMMU off")


_SHOWN_OPTIONS = ("data", "proto", "vers", "dax", "discard", "ro", "rw", "sync", "nobarrier", "cache", "rsize", "wsize")


def shown_options(options: tuple[str, ...]) -> tuple[str, ...]:
    """Return the mount options that matter here; others can name servers, users and paths."""
    return tuple(option for option in options if option.partition("=")[0] in _SHOWN_OPTIONS)


def _file_system(facts: Facts, trials: Trials) -> Finding | None:
    system, journal = facts.gds.file_system, facts.gds.journal
    options = [o for o in shown_options(system.options) if o != "rw" and not o.startswith("data=")]
    if journal:
        options.insert(0, "no journal" if journal == "none" else f"data={journal}")
    return Finding("file-system", Level.OK, f"{system.type} ({', '.join(options)})" if options else system.type)


def _direct_io(facts: Facts, trials: Trials) -> Finding | None:
    direct = facts.gds.direct_io
    text = f"O_DIRECT works; memory aligned to {direct.memory_align}, offsets to {direct.offset_align} bytes"
    return Finding("direct-io", Level.OK, text if direct.reason == "statx" else f"{text} ({direct.reason})")


def _disk(facts: Facts, trials: Trials) -> Finding | None:
    disk = facts.gds.disk
    if disk.kind == "none":
        return None
    if disk.kind == "hidden":
        text = f"/sys does not show the disk {facts.gds.device} here"
        return Finding("disk", Level.NOTE, text, "mount sysfs: libcufile looks the disk up there")
    kind = disk.kind if disk.kind != "nvme" else "NVMe"
    return Finding("disk", Level.OK, f"{' on '.join(disk.layers)} ({kind}{' ' + disk.detail if disk.detail else ''})")


def _udev(facts: Facts, trials: Trials) -> Finding | None:
    if not facts.gds.udev_record:
        return None
    return Finding("udev", Level.OK, f"/run/udev/data/b{facts.gds.device} is readable")


def _numa(facts: Facts, trials: Trials) -> Finding | None:
    if not facts.numa_distance:
        return None
    far = [index for index, distance in facts.numa_distance.items() if distance > 10]
    if far:
        text = f"GPU {', '.join(map(str, far))} and the disk are on different NUMA nodes"
        text += f" (distance {max(facts.numa_distance.values())}, where 10 is the same node)"
        return Finding("numa", Level.NOTE, text, "use a GPU or a disk of the same node for the full rate")
    return Finding("numa", Level.OK, "GPUs and disk are on the same NUMA node")


_LEAST_MEMLOCK = 64 << 20


def _memlock(facts: Facts, trials: Trials) -> Finding | None:
    if facts.memlock is None:
        return Finding("memlock", Level.OK, "no limit on locked memory")
    text = f"{facts.memlock / (1 << 20):g} MiB of memory may be locked"
    # What CUDA pins does not count against the limit; what RDMA registers does.
    if facts.gds.file_system.network and facts.memlock < _LEAST_MEMLOCK:
        remedy = "raise it (ulimit -l unlimited; docker run --ulimit memlock=-1)"
        return Finding("memlock", Level.NOTE, f"{text}, too little for the buffers of RDMA", remedy)
    return Finding("memlock", Level.OK, text)


def _access(facts: Facts, trials: Trials) -> Finding | None:
    if facts.writable:
        return None
    text = "no file may be made here, so nothing can be saved"
    return Finding("access", Level.NOTE, text, "name a directory that you may write")


def _trial(facts: Facts, trials: Trials) -> Finding | None:
    strict, lenient = trials.strict, trials.lenient
    if strict is None:
        return None
    if not strict.tried:
        return Finding("trial", Level.NOTE, f"cuFile was not tried: {strict.reason}", strict.remedy)
    kernel = ""
    if strict.nvfs_version != (0, 0):
        kernel = f"; it works with nvidia-fs {strict.nvfs_version[0]}.{strict.nvfs_version[1]}"
    if strict.status_flags:
        kernel += f"; it serves {'/'.join(flag.name or '' for flag in DriverStatus if flag & strict.status_flags)}"
    known = judge(facts.gds)
    status = conclude(facts.gds, strict)
    if status.direct:
        done = "moved blocks" if any(transfer.ok for transfer in strict.transfers) else "registered a file"
        how = "with compatibility mode forbidden" if strict.forbade_compatibility else "on nvidia-fs"
        text = f"cuFile {done} {how}{kernel}"
        untried = next((transfer for transfer in strict.transfers if not transfer.tried), None)
        if untried is not None:
            return Finding("trial", Level.NOTE, f"{text}; not on GPU {untried.gpu}: {untried.reason}", untried.remedy)
        if known is not None:
            # The facts deny what the trial did: somebody should hear of it.
            return Finding("trial", Level.NOTE, text, "report this: it contradicts the problems above")
        return Finding("trial", Level.OK, text)
    if lenient is not None and lenient.ok:
        done = "moves blocks" if any(transfer.ok for transfer in lenient.transfers) else "registers files"
        text = f"cuFile {done} in its compatibility mode only"
        # Where the facts have named the cause, the trial just confirms it.
        if known is not None:
            return Finding("trial", Level.NOTE, text)
        return Finding("trial", Level.PROBLEM, f"{text}: {status.reason}", status.remedy)
    failed = lenient or strict
    if known is not None and not known.compatible:
        return Finding("trial", Level.NOTE, f"cuFile confirms it: {failed.reason}")
    return Finding("trial", Level.PROBLEM, failed.reason, failed.remedy)


_CHECKS: tuple[tuple[str, Callable[[Facts, Trials], Finding | None]], ...] = (
    ("wsl", _wsl),
    ("container", _container),
    ("gpu", _gpu),
    ("driver", _driver),
    ("bar1", _bar1),
    ("libcufile", _libcufile),
    ("config", _config),
    ("nvidia-fs", _nvidia_fs),
    ("p2pdma", _p2pdma),
    ("iommu", _iommu),
    ("file-system", _file_system),
    ("direct-io", _direct_io),
    ("disk", _disk),
    ("udev", _udev),
    ("numa", _numa),
    ("memlock", _memlock),
    ("access", _access),
    ("trial", _trial),
)


# ---------------------------------------------------------------------------------------------------------------------
# Verdicts
# ---------------------------------------------------------------------------------------------------------------------

_TYPES = sorted(transfer_type for transfer_type in TransferType if transfer_type is not TransferType.AUTO)
_NEEDS = {TransferType.GPU_ASYNC: "cuFileReadAsync", TransferType.GPU_BATCH: "cuFileBatchIOSetUp"}


def verdicts(facts: Facts, trials: Trials) -> tuple[TransferVerdict, ...]:
    """Judge the seven transfer types for each GPU, or without one, in the order of GPUs and codes."""
    cards: tuple[Gpu | None, ...] = facts.gpus or (None,)
    return tuple(
        _cufile_verdict(kind, gpu, facts, trials) if kind.uses_cufile else _host_verdict(kind, gpu, facts)
        for gpu in cards
        for kind in _TYPES
    )


def _host_verdict(kind: TransferType, gpu: Gpu | None, facts: Facts) -> TransferVerdict:
    index = gpu.index if gpu else None
    needs_gpu = kind in (TransferType.CPU_GPU, TransferType.CPU_ASYNC_GPU)
    if needs_gpu and gpu is None:
        return TransferVerdict(kind, index, Quality.UNAVAILABLE, "no GPU", "use CPU_ONLY or AUTO")
    if needs_gpu and gpu is not None and not gpu.usable:
        return TransferVerdict(kind, index, Quality.UNAVAILABLE, *_unusable(facts))
    direct = facts.gds.direct_io
    if not kind.uses_direct_io:
        return TransferVerdict(kind, index, Quality.AVAILABLE, "goes through the page cache")
    if not direct.supported:
        reason = f"O_DIRECT does not work: {direct.reason}"
        return TransferVerdict(kind, index, Quality.UNAVAILABLE, reason, "use CPU_CACHED_GPU or AUTO")
    system = facts.gds.file_system
    reason = f"O_DIRECT works, but {system.type} is memory anyway" if system.in_memory else "O_DIRECT works"
    return TransferVerdict(kind, index, Quality.AVAILABLE, reason)


def _cufile_verdict(kind: TransferType, gpu: Gpu | None, facts: Facts, trials: Trials) -> TransferVerdict:
    index = gpu.index if gpu else None
    status = _cufile_status(gpu, facts, trials)
    trial = trials.lenient or trials.strict
    symbol = _NEEDS.get(kind)
    works = status.direct or status.compatible
    if works and symbol and trial is not None and trial.driver_opened and symbol not in trial.symbols:
        reason, remedy = f"this libcufile has no {symbol}", "install a newer CUDA toolkit or nvidia-cufile package"
        return TransferVerdict(kind, index, Quality.UNAVAILABLE, reason, remedy)
    quality = Quality.DIRECT if status.direct else Quality.COMPATIBILITY if works else Quality.UNAVAILABLE
    return TransferVerdict(kind, index, quality, status.reason, status.remedy)


def _cufile_status(gpu: Gpu | None, facts: Facts, trials: Trials) -> GdsStatus:
    by_facts = judge(facts.gds)
    strict, lenient = trials.strict, trials.lenient
    if by_facts is None or by_facts.compatible:
        if gpu is None:
            return GdsStatus(False, False, "no GPU", "pass a GPU into the container (docker run --gpus all)")
        if not gpu.usable:
            return GdsStatus(False, False, *_unusable(facts))
        if not facts.libcufile.path:
            return GdsStatus(False, False, f"no libcufile: {facts.libcufile.reason}", facts.libcufile.remedy)
    if strict is None or not strict.tried:
        why = f"cuFile was not tried: {strict.reason}" if strict is not None else "cuFile was not tried"
        return by_facts or GdsStatus(False, False, why, strict.remedy if strict is not None else "try it (live=True)")
    status = by_facts if by_facts is not None else conclude(facts.gds, _for_gpu(strict, gpu))
    if status.direct:
        return status
    tried = _for_gpu(lenient or strict, gpu)
    # What was tried and failed outweighs what the facts led to expect of compatibility mode.
    if not tried.ok and (by_facts is None or by_facts.compatible):
        return GdsStatus(False, False, tried.reason, tried.remedy)
    return dataclasses.replace(status, compatible=tried.ok)


def _for_gpu(proof: Proof, gpu: Gpu | None) -> Proof:
    """Narrow a trial of all GPUs down to one; what could not be tried there leaves the registration to judge by."""
    transfer = proof.on_gpu(gpu.pci, gpu.index) if gpu is not None else None
    if transfer is None:
        return proof
    if not transfer.tried:
        return dataclasses.replace(proof, ok=proof.registered, transfers=())
    return dataclasses.replace(
        proof, ok=transfer.ok, reason=transfer.reason, remedy=transfer.remedy, transfers=(transfer,)
    )
