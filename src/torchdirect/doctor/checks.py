"""The doctor's judgement: facts and trials in, findings and verdicts out. Nothing here looks at the machine."""

from __future__ import annotations

from torchdirect.cufile.structs import DriverStatus
from torchdirect.doctor.facts import Facts, Gpu
from torchdirect.doctor.report import Finding, Level, Quality, TransferVerdict
from torchdirect.gds_proof import Proof
from torchdirect.gds_status import P2PDMA_BRANCH, GdsStatus, Objection, conclude, judge, objections, p2pdma_objection
from torchdirect.transfer import TransferType

__all__ = ["Trials", "findings", "verdicts"]

_GIB = 1 << 30


class Trials:
    """The two trials of cuFile: with compatibility mode forbidden, and allowed; None where it was not tried."""

    def __init__(self, strict: Proof | None = None, lenient: Proof | None = None) -> None:
        self.strict = strict
        self.lenient = lenient


# ---------------------------------------------------------------------------------------------------------------------
# Findings
# ---------------------------------------------------------------------------------------------------------------------


def findings(facts: Facts, trials: Trials) -> tuple[Finding, ...]:
    """Judge everything that was looked at, one finding each, in the order in which a reader would look."""
    objected: dict[str, Objection] = {}
    for objection in objections(facts.gds):
        objected.setdefault(objection.check, objection)
    found = []
    for name, text in (
        ("wsl", ""),
        ("container", f"in a {facts.container} container" if facts.container else "not in a container"),
        ("gpu", _gpu_text(facts)),
        ("driver", ""),
        ("bar1", ""),
        ("libcufile", ""),
        ("config", _config_text(facts)),
        ("nvidia-fs", _nvidia_fs_text(facts)),
        ("p2pdma", ""),
        ("iommu", ""),
        ("file-system", _file_system_text(facts)),
        ("direct-io", _direct_io_text(facts)),
        ("disk", _disk_text(facts)),
        ("udev", f"/run/udev/data/b{facts.gds.device} is readable" if facts.gds.udev_record else ""),
        ("numa", ""),
        ("memlock", ""),
        ("trial", ""),
    ):
        if name in objected:
            # Every cause is in the way, except what stops only the direct path of a machine that has no GPU at all.
            found.append(Finding(name, Level.PROBLEM, objected[name].reason, objected[name].remedy))
            continue
        finding = _SPECIAL[name](facts, trials) if name in _SPECIAL else Finding(name, Level.OK, text) if text else None
        if finding is not None:
            found.append(finding)
    return tuple(found)


def _gpu_text(facts: Facts) -> str:
    names: dict[str, int] = {}
    for gpu in facts.gpus:
        names[gpu.name] = names.get(gpu.name, 0) + 1
    return ", ".join(f"{count} x {name}" for name, count in names.items())


def _config_text(facts: Facts) -> str:
    config = facts.gds.config
    switches = (
        ("allow_compat_mode", config.allow_compat_mode),
        ("force_compat_mode", config.force_compat_mode),
        ("use_pci_p2pdma", config.use_pci_p2pdma),
        ("block.nvme.use_pci_p2pdma", config.nvme_p2pdma),
    )
    shown = ", ".join(f"{name} {str(value).lower()}" for name, value in switches if value is not None)
    where = config.path or "no cufile.json, so libcufile's defaults"
    return f"{where}: {shown}" if shown else where


def _nvidia_fs_text(facts: Facts) -> str:
    if facts.gds.nvidia_fs is None:
        return ""
    return f"nvidia-fs {facts.gds.nvidia_fs or '(unknown version)'} is loaded".replace("  ", " ")


_SHOWN_OPTIONS = ("data", "proto", "vers", "dax", "discard", "ro", "rw", "sync", "nobarrier", "cache", "rsize", "wsize")


def shown_options(options: tuple[str, ...]) -> tuple[str, ...]:
    """Return the mount options that matter here; others can name servers, users and paths."""
    return tuple(option for option in options if option.partition("=")[0] in _SHOWN_OPTIONS)


def _file_system_text(facts: Facts) -> str:
    system = facts.gds.file_system
    options = [o for o in shown_options(system.options) if o != "rw"]
    if system.type == "ext4" and not any(o.startswith("data=") for o in options):
        options.insert(0, "data=ordered by default")
    return f"{system.type} ({', '.join(options)})" if options else system.type


def _direct_io_text(facts: Facts) -> str:
    direct = facts.gds.direct_io
    return f"O_DIRECT works; memory aligned to {direct.memory_align}, offsets to {direct.offset_align} bytes"


def _disk_text(facts: Facts) -> str:
    disk = facts.gds.disk
    if disk.kind == "none":
        return ""
    if disk.kind == "hidden":
        return f"the block device {facts.gds.device} is not shown in /sys here"
    return " on ".join(disk.layers) + f" ({disk.kind}{' ' + disk.detail if disk.detail else ''})"


def _wsl(facts: Facts, trials: Trials) -> Finding | None:
    return None


def _gpu(facts: Facts, trials: Trials) -> Finding | None:
    text = _gpu_text(facts)
    if not facts.gpus:
        return None
    if all(gpu.usable for gpu in facts.gpus):
        return Finding("gpu", Level.OK, text)
    if not facts.torch_cuda:
        remedy = "install a CUDA build of torch"
        return Finding("gpu", Level.PROBLEM, f"{text}, and this torch is a CPU build, which cannot use them", remedy)
    reason = f"{text}, and torch (CUDA {facts.torch_cuda}) cannot use them"
    return Finding("gpu", Level.PROBLEM, reason, "install a driver that is new enough for this torch; see nvidia-smi")


def _driver(facts: Facts, trials: Trials) -> Finding | None:
    driver = facts.gds.driver
    if driver is None:
        return None
    kinds = {True: "open kernel modules", False: "proprietary kernel modules", None: "kind of modules not told"}
    text = f"NVIDIA driver {driver.version or '(unknown version)'}, {kinds[driver.open_modules]}"
    if driver.open_modules is False:
        needed = f"newer nvidia-fs and PCI P2PDMA (driver {P2PDMA_BRANCH}) need them"
        remedy = f"install the open kernel modules (nvidia-open): {needed}"
        return Finding("driver", Level.NOTE, text, remedy)
    return Finding("driver", Level.OK, text)


def _bar1(facts: Facts, trials: Trials) -> Finding | None:
    sizes = sorted({gpu.bar1_bytes for gpu in facts.gpus if gpu.bar1_bytes})
    if not sizes:
        return None
    text = "BAR1 of " + ", ".join(_size(size) for size in sizes)
    if sizes[0] < _GIB:
        return Finding("bar1", Level.NOTE, f"{text}: only so much GPU memory can be pinned", "enable resizable BAR")
    return Finding("bar1", Level.OK, text)


def _size(nbytes: int) -> str:
    return f"{nbytes / _GIB:g} GiB" if nbytes >= _GIB else f"{nbytes >> 20} MiB"


def _libcufile(facts: Facts, trials: Trials) -> Finding | None:
    found = facts.libcufile
    if not found.path:
        return Finding("libcufile", Level.PROBLEM, f"no libcufile: {found.reason}", found.remedy)
    version = f"libcufile {found.version}" if found.version else "libcufile"
    return Finding("libcufile", Level.OK, f"{version}, from the {_SOURCES.get(found.source, found.source)}")


_SOURCES = {
    "environment": "path in TORCHDIRECT_LIBCUFILE",
    "loaded": "library that this process has loaded",
    "loader": "system's library path",
    "toolkit": "CUDA toolkit",
    "pip": "pip package",
}


def _config(facts: Facts, trials: Trials) -> Finding | None:
    config = facts.gds.config
    if config.error:
        reason = f"{config.path} {config.error}"
        return Finding("config", Level.PROBLEM, reason, "repair the file, or unset CUFILE_ENV_PATH_JSON")
    if config.allow_compat_mode is False:
        remedy = "set allow_compat_mode to true if cuFile shall work without a direct path"
        return Finding("config", Level.NOTE, _config_text(facts), remedy)
    return Finding("config", Level.OK, _config_text(facts))


def _p2pdma(facts: Facts, trials: Trials) -> Finding | None:
    objection = p2pdma_objection(facts.gds)
    if objection is not None:
        # In the way only without nvidia-fs, and then the finding about nvidia-fs says so.
        if facts.gds.nvidia_fs is not None:
            return Finding("p2pdma", Level.NOTE, objection.reason)
        return None
    if facts.nvme_multipath:
        text = "PCI P2PDMA is switched on, but the kernel's NVMe multipathing is too, which keeps it from working"
        return Finding("p2pdma", Level.PROBLEM, text, "load nvme_core with multipath=N")
    if facts.gds.driver is not None and facts.registry.get("RMForceStaticBar1") != "1":
        text = "PCI P2PDMA is switched on, but the driver parameter RMForceStaticBar1=1 (needed on x86) is not set"
        remedy = 'load nvidia with NVreg_RegistryDwords="RMForceStaticBar1=1;RmForceDisableIomapWC=1;"'
        return Finding("p2pdma", Level.NOTE, text, remedy)
    return Finding("p2pdma", Level.OK, "PCI P2PDMA is switched on in kernel, driver and cufile.json")


def _iommu(facts: Facts, trials: Trials) -> Finding | None:
    if not facts.iommu:
        return Finding("iommu", Level.OK, "no IOMMU translates addresses")
    if facts.iommu_passthrough:
        return Finding("iommu", Level.OK, "the IOMMU passes addresses through (iommu=pt)")
    text = "an IOMMU translates addresses, which slows direct transfers down or stops them"
    return Finding("iommu", Level.NOTE, text, "boot with iommu=pt, or switch the IOMMU off")


def _udev(facts: Facts, trials: Trials) -> Finding | None:
    if facts.gds.udev_record:
        return Finding("udev", Level.OK, f"/run/udev/data/b{facts.gds.device} is readable")
    return None


def _numa(facts: Facts, trials: Trials) -> Finding | None:
    far = [index for index, distance in facts.numa_distance.items() if distance > 10]
    if not facts.numa_distance:
        return None
    if far:
        which = ", ".join(map(str, far))
        distance = max(facts.numa_distance.values())
        text = f"GPU {which} and the disk are on different NUMA nodes (distance {distance})"
        return Finding("numa", Level.NOTE, text, "use a GPU or a disk of the same node for the full rate")
    return Finding("numa", Level.OK, "GPUs and disk are on the same NUMA node")


_LEAST_MEMLOCK = 64 << 20


def _memlock(facts: Facts, trials: Trials) -> Finding | None:
    if facts.memlock is None:
        return Finding("memlock", Level.OK, "no limit on locked memory")
    text = f"{facts.memlock / (1 << 20):g} MiB of memory may be locked"
    if facts.memlock < _LEAST_MEMLOCK:
        return Finding("memlock", Level.NOTE, text, "raise it (ulimit -l unlimited; docker run --ulimit memlock=-1)")
    return Finding("memlock", Level.OK, text)


def _trial(facts: Facts, trials: Trials) -> Finding | None:
    strict, lenient = trials.strict, trials.lenient
    if strict is None:
        return None
    with_nvfs = strict.nvfs_version != (0, 0)
    kernel = f", nvidia-fs {strict.nvfs_version[0]}.{strict.nvfs_version[1]}" if with_nvfs else ""
    if strict.status_flags:
        kernel += f", serves {'/'.join(flag.name or '' for flag in DriverStatus if flag & strict.status_flags)}"
    if strict.ok:
        done = "moved a block" if strict.transfers else "registered a file"
        if strict.forbade_compatibility or with_nvfs:
            return Finding("trial", Level.OK, f"cuFile {done} with compatibility mode forbidden{kernel}")
    known = judge(facts.gds)
    if lenient is not None and lenient.ok:
        done = "moves blocks" if lenient.transfers else "registers files"
        without = conclude(facts.gds, strict)
        text = f"cuFile {done} in its compatibility mode only"
        # Where the facts have named the cause, the trial just confirms it.
        if known is not None:
            return Finding("trial", Level.NOTE, text)
        return Finding("trial", Level.PROBLEM, f"{text}: {without.reason}", without.remedy)
    failed = lenient or strict
    if known is not None and not known.compatible:
        return Finding("trial", Level.NOTE, f"cuFile confirms it: {failed.reason}")
    return Finding("trial", Level.PROBLEM, failed.reason, failed.remedy)


_SPECIAL = {
    "wsl": _wsl,
    "gpu": _gpu,
    "driver": _driver,
    "bar1": _bar1,
    "libcufile": _libcufile,
    "config": _config,
    "p2pdma": _p2pdma,
    "iommu": _iommu,
    "udev": _udev,
    "numa": _numa,
    "memlock": _memlock,
    "trial": _trial,
}


# ---------------------------------------------------------------------------------------------------------------------
# Verdicts
# ---------------------------------------------------------------------------------------------------------------------

_TYPES = [transfer_type for transfer_type in TransferType if transfer_type is not TransferType.AUTO]
_NEEDS = {TransferType.GPU_ASYNC: "cuFileReadAsync", TransferType.GPU_BATCH: "cuFileBatchIOSetUp"}


def verdicts(facts: Facts, trials: Trials) -> tuple[TransferVerdict, ...]:
    """Judge the seven transfer types for each GPU, or without one, in the order of GPUs and codes."""
    cards: tuple[Gpu | None, ...] = facts.gpus or (None,)
    return tuple(
        _cufile_verdict(kind, gpu, facts, trials) if kind.uses_cufile else _host_verdict(kind, gpu, facts)
        for gpu in cards
        for kind in sorted(_TYPES)
    )


def _host_verdict(kind: TransferType, gpu: Gpu | None, facts: Facts) -> TransferVerdict:
    index = gpu.index if gpu else None
    needs_gpu = kind in (TransferType.CPU_GPU, TransferType.CPU_ASYNC_GPU)
    if needs_gpu and (gpu is None or not gpu.usable):
        reason = "no GPU" if gpu is None else "torch cannot use this GPU"
        remedy = "use CPU_ONLY or AUTO" if gpu is None else _gpu_remedy(facts)
        return TransferVerdict(kind, index, Quality.UNAVAILABLE, reason, remedy)
    direct = facts.gds.direct_io
    if kind.uses_direct_io and not direct.supported:
        reason = f"O_DIRECT does not work: {direct.reason}"
        return TransferVerdict(kind, index, Quality.UNAVAILABLE, reason, "use CPU_CACHED_GPU or AUTO")
    reason = "O_DIRECT works" if kind.uses_direct_io else "goes through the page cache"
    return TransferVerdict(kind, index, Quality.AVAILABLE, reason)


def _gpu_remedy(facts: Facts) -> str:
    return "install a driver that is new enough for this torch" if facts.torch_cuda else "install a CUDA build of torch"


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
    if gpu is None and by_facts is None:
        return GdsStatus(False, False, "no GPU", "pass a GPU into the container (docker run --gpus all)")
    if not facts.libcufile.path and not (by_facts and not by_facts.compatible):
        return GdsStatus(False, False, f"no libcufile: {facts.libcufile.reason}", facts.libcufile.remedy)
    if gpu is not None and not gpu.usable and (by_facts is None or by_facts.compatible):
        return GdsStatus(False, False, "torch cannot use this GPU", _gpu_remedy(facts))
    if strict is None:
        return by_facts or GdsStatus(False, False, "cuFile was not tried", "name a directory that may be written")
    compatible, tried = _works(lenient, gpu)
    status = by_facts if by_facts is not None else conclude(facts.gds, _for_gpu(strict, gpu))
    if status.direct:
        return status
    if lenient is None:
        return GdsStatus(False, False, status.reason, status.remedy)
    # What was tried and failed outweighs what the facts led to expect of compatibility mode.
    if not compatible and (by_facts is None or by_facts.compatible):
        return GdsStatus(False, False, tried.reason, tried.remedy)
    return GdsStatus(False, compatible, status.reason, status.remedy)


def _for_gpu(proof: Proof, gpu: Gpu | None) -> Proof:
    """Narrow a trial of all GPUs down to one."""
    transfer = proof.on_gpu(gpu.pci, gpu.index) if gpu is not None else None
    if transfer is None:
        return proof
    return Proof(
        transfer.ok,
        transfer.reason,
        transfer.remedy,
        proof.driver_opened,
        proof.registered,
        proof.forbade_compatibility,
        proof.nvfs_version,
        proof.status_flags,
        proof.features,
        proof.symbols,
        (transfer,),
    )


def _works(proof: Proof | None, gpu: Gpu | None) -> tuple[bool, Proof]:
    if proof is None:
        return False, Proof(False, "cuFile was not tried")
    narrowed = _for_gpu(proof, gpu)
    return narrowed.ok, narrowed
