"""Run the doctor: gather facts, try cuFile where that can tell more, and put the report together."""

from __future__ import annotations

import dataclasses
import errno
import os
import stat
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torchdirect.doctor import checks
from torchdirect.doctor.facts import Facts, Gpu, gather_facts
from torchdirect.doctor.privacy import scrubber
from torchdirect.doctor.report import Report
from torchdirect.gds_facts import Tree
from torchdirect.gds_proof import Proof, prove, trial_file

__all__ = ["diagnose"]

_TRIAL_BYTES = 64 << 10


def diagnose(
    path: str | os.PathLike[str] = ".",
    *,
    live: bool = True,
    tree: Tree | None = None,
    gpus: tuple[Gpu, ...] | None = None,
    trial: Callable[..., Proof] = prove,
) -> Report:
    """Find out which transfer types work for a path, and why the others do not.

    Parameters
    ----------
    path : path, optional
        An existing file or directory. The directory beside a file that does not exist yet counts for it.
    live : bool, optional
        Whether cuFile is tried on a temporary file beside the path (64 KiB, removed again), in child processes.
    tree, gpus, trial : optional
        Stand-ins for the kernel's files, the GPUs and the trial, in tests.

    Returns
    -------
    Report
        Needs no privileges, and holds nothing that identifies the machine or its user.

    Raises
    ------
    OSError
        If the path is neither a file nor a directory, cannot be looked up, or does not exist and neither does the
        directory that it names a file in.
    """
    named = os.fsdecode(path)
    place = _existing(named)
    facts = gather_facts(place, tree, gpus)
    trials = _try(place, trial) if live and _worth_trying(facts) else checks.Trials()
    clean = scrubber(named)
    return Report(
        path=clean(named),
        version=_version(),
        facts=clean(_facts_json(facts)),
        findings=tuple(
            dataclasses.replace(f, text=clean(f.text), remedy=clean(f.remedy)) for f in checks.findings(facts, trials)
        ),
        transfers=tuple(
            dataclasses.replace(v, reason=clean(v.reason), remedy=clean(v.remedy))
            for v in checks.verdicts(facts, trials)
        ),
    )


def _existing(named: str) -> str:
    if not named or "\0" in named:
        raise OSError(errno.EINVAL, "this is no path")
    place = os.path.realpath(named)
    try:
        mode = os.stat(place).st_mode
    except FileNotFoundError:
        place = os.path.dirname(place)
        if not os.path.isdir(place):
            what = "neither it nor its directory exists; name an existing file or directory"
            raise FileNotFoundError(errno.ENOENT, what) from None
        mode = os.stat(place).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "it is neither a regular file nor a directory")
    return place


def _version() -> str:
    import torchdirect

    return torchdirect.__version__


def _worth_trying(facts: Facts) -> bool:
    # Without a GPU or a library there is nothing to try, and WSL ends the process.
    return any(gpu.usable for gpu in facts.gpus) and bool(facts.libcufile.path) and not facts.gds.wsl


def _try(place: str, trial: Callable[..., Proof]) -> checks.Trials:
    with ExitStack() as stack:
        target, writable = place, False
        directory = place if os.path.isdir(place) else os.path.dirname(place)
        # A single file can be a mount of its own; the directory that it appears in is then another file system.
        if os.stat(directory).st_dev == os.stat(place).st_dev:
            try:
                target, writable = stack.enter_context(trial_file(directory, _TRIAL_BYTES)), True
            except OSError:
                # No room, or no permission: a file that is there already can still be read.
                pass
        strict = trial(target, forbid_compatibility=True, writable=writable)
        lenient = strict if strict.ok else trial(target, forbid_compatibility=False, writable=writable)
    return checks.Trials(strict, lenient)


def _facts_json(facts: Facts) -> dict[str, Any]:
    """Choose what goes into the JSON: by name, so that no new fact is published before somebody has thought of it."""
    gds = facts.gds
    driver, config, disk, direct = gds.driver, gds.config, gds.disk, gds.direct_io
    return {
        "kernel": facts.kernel,
        "machine": facts.machine,
        "wsl": gds.wsl,
        "container": facts.container,
        "gpus": [
            {
                "index": gpu.index,
                "name": gpu.name,
                "pci": gpu.pci,
                "bar1_bytes": gpu.bar1_bytes,
                "numa_node": gpu.numa_node,
                "usable": gpu.usable,
                "numa_distance_to_disk": facts.numa_distance.get(gpu.index),
            }
            for gpu in facts.gpus
        ],
        "driver": None if driver is None else {"version": driver.version, "open_modules": driver.open_modules},
        "driver_registry": facts.registry,
        "torch_cuda": facts.torch_cuda,
        "cuda_fault": facts.cuda_fault.reason if facts.cuda_fault is not None else "",
        "libcufile": {
            "file": os.path.basename(facts.libcufile.path),
            "source": facts.libcufile.source,
            "version": facts.libcufile.version,
        },
        "cufile_config": {
            "path": config.path,
            "allow_compat_mode": config.allow_compat_mode,
            "force_compat_mode": config.force_compat_mode,
            "use_pci_p2pdma": config.use_pci_p2pdma,
            "nvme_use_pci_p2pdma": config.nvme_p2pdma,
            "raid_use_pci_p2pdma": config.raid_p2pdma,
            "denylist_entries": len(config.denied),
            "error": config.error,
        },
        "nvidia_fs": {
            "loaded": gds.nvidia_fs is not None,
            "version": gds.nvidia_fs,
            "device_nodes": gds.nvidia_fs_nodes,
            "statistics": list(facts.nvidia_fs_stats),
        },
        "kernel_p2pdma": gds.kernel_p2pdma,
        "nvme_multipath": facts.nvme_multipath,
        "iommu": {"state": facts.iommu, "kernel_options": list(facts.iommu_options)},
        "file_system": {
            "type": gds.file_system.type,
            "options": list(checks.shown_options(gds.file_system.options)),
            "journal": gds.journal,
            "network": gds.file_system.network,
            "in_memory": gds.file_system.in_memory,
        },
        "direct_io": {
            "supported": direct.supported,
            "memory_align": direct.memory_align,
            "offset_align": direct.offset_align,
            "reason": direct.reason,
        },
        "disk": {
            "device": gds.device,
            "kind": disk.kind,
            "layers": list(disk.layers),
            "detail": disk.detail,
            "pci": disk.pci,
            "numa_node": disk.numa_node,
        },
        "udev_record": gds.udev_record,
        "memlock_bytes": facts.memlock,
        "directory_writable": facts.writable,
    }
