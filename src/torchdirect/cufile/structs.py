"""Structures, enumerations and flags of the cuFile C interface.

The layouts are those of ``cufile.h`` for 64-bit Linux. Sizes and offsets were compared with a C program built from the
headers of libcufile 1.11, 1.14 and 1.15; the tests keep the numbers.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum, IntFlag

# off_t and ssize_t are both 64 bits wide on every platform that libcufile exists for.
off_t = ctypes.c_int64
ssize_t = ctypes.c_ssize_t


class Status(ctypes.Structure):
    """``CUfileError_t``: a cuFile code and, beside it, a CUDA driver code."""

    _fields_ = [("err", ctypes.c_int), ("cu_err", ctypes.c_int)]


class FileHandleType(IntEnum):
    """``CUfileFileHandleType``: what a descriptor holds."""

    OPAQUE_FD = 1
    OPAQUE_WIN32 = 2
    USERSPACE_FS = 3


class _DescrHandle(ctypes.Union):
    _fields_ = [("fd", ctypes.c_int), ("handle", ctypes.c_void_p)]


class Descr(ctypes.Structure):
    """``CUfileDescr_t``: the file that is being registered."""

    _fields_ = [("type", ctypes.c_int), ("handle", _DescrHandle), ("fs_ops", ctypes.c_void_p)]


class _Nvfs(ctypes.Structure):
    _fields_ = [
        ("major_version", ctypes.c_uint),
        ("minor_version", ctypes.c_uint),
        ("poll_thresh_size", ctypes.c_size_t),
        ("max_direct_io_size", ctypes.c_size_t),
        ("dstatusflags", ctypes.c_uint),
        ("dcontrolflags", ctypes.c_uint),
    ]


class DrvProps(ctypes.Structure):
    """``CUfileDrvProps_t``: limits of the driver session; sizes in KiB."""

    _fields_ = [
        ("nvfs", _Nvfs),
        ("fflags", ctypes.c_uint),
        ("max_device_cache_size", ctypes.c_uint),
        ("per_buffer_cache_size", ctypes.c_uint),
        ("max_device_pinned_mem_size", ctypes.c_uint),
        ("max_batch_io_size", ctypes.c_uint),
        ("max_batch_io_timeout_msecs", ctypes.c_uint),
    ]


class DriverStatus(IntFlag):
    """Bits of ``dstatusflags``: the storage kinds that the kernel driver serves (bit 10 is reserved)."""

    LUSTRE = 1 << 0
    WEKAFS = 1 << 1
    NFS = 1 << 2
    GPFS = 1 << 3
    NVME = 1 << 4
    NVMEOF = 1 << 5
    SCSI = 1 << 6
    SCALEFLUX_CSD = 1 << 7
    NVMESH = 1 << 8
    BEEGFS = 1 << 9
    NVME_P2P = 1 << 11
    SCATEFS = 1 << 12


class DriverControl(IntFlag):
    """Bits of ``dcontrolflags``."""

    USE_POLL_MODE = 1 << 0
    ALLOW_COMPAT_MODE = 1 << 1


class Feature(IntFlag):
    """Bits of ``fflags``."""

    DYNAMIC_ROUTING = 1 << 0
    BATCH_IO = 1 << 1
    STREAMS = 1 << 2
    PARALLEL_IO = 1 << 3


class BufferFlags(IntFlag):
    """Flags of ``cuFileBufRegister``."""

    NONE = 0
    RDMA_REGISTER = 1
    RDMA_RELAXED_ORDERING = 2


class StreamFlags(IntFlag):
    """Flags of ``cuFileStreamRegister``: what the caller promises about every request on the stream."""

    NONE = 0
    FIXED_BUF_OFFSET = 1
    FIXED_FILE_OFFSET = 2
    FIXED_FILE_SIZE = 4
    PAGE_ALIGNED_INPUTS = 8


class Opcode(IntEnum):
    """``CUfileOpcode_t``."""

    READ = 0
    WRITE = 1


class BatchMode(IntEnum):
    """``CUfileBatchMode_t``."""

    BATCH = 1


class BatchStatus(IntFlag):
    """``CUfileStatus_t``: where one batch entry stands."""

    WAITING = 0x01
    PENDING = 0x02
    INVALID = 0x04
    CANCELED = 0x08
    COMPLETE = 0x10
    TIMEOUT = 0x20
    FAILED = 0x40


class _BatchRange(ctypes.Structure):
    _fields_ = [
        ("devPtr_base", ctypes.c_void_p),
        ("file_offset", off_t),
        ("devPtr_offset", off_t),
        ("size", ctypes.c_size_t),
    ]


class _IOUnion(ctypes.Union):
    _fields_ = [("batch", _BatchRange)]


class IOParams(ctypes.Structure):
    """``CUfileIOParams_t``: one batch entry."""

    _fields_ = [
        ("mode", ctypes.c_int),
        ("u", _IOUnion),
        ("fh", ctypes.c_void_p),
        ("opcode", ctypes.c_int),
        ("cookie", ctypes.c_void_p),
    ]


class IOEvents(ctypes.Structure):
    """``CUfileIOEvents_t``. The header has ``ret`` as size_t yet negative errors go into it: signed here."""

    _fields_ = [("cookie", ctypes.c_void_p), ("status", ctypes.c_int), ("ret", ssize_t)]


class Timespec(ctypes.Structure):
    """``struct timespec`` of 64-bit Linux."""

    _fields_ = [("tv_sec", ctypes.c_int64), ("tv_nsec", ctypes.c_long)]


class AsyncArguments(ctypes.Structure):
    """The four values that a stream request points at; cuFile reads and writes them while the stream runs."""

    _fields_ = [("size", ctypes.c_size_t), ("file_offset", off_t), ("ptr_offset", off_t), ("bytes_done", ssize_t)]


class SizeParameter(IntEnum):
    """``CUFileSizeTConfigParameter_t``."""

    PROFILE_STATS = 0
    EXECUTION_MAX_IO_QUEUE_DEPTH = 1
    EXECUTION_MAX_IO_THREADS = 2
    EXECUTION_MIN_IO_THRESHOLD_SIZE_KB = 3
    EXECUTION_MAX_REQUEST_PARALLELISM = 4
    PROPERTIES_MAX_DIRECT_IO_SIZE_KB = 5
    PROPERTIES_MAX_DEVICE_CACHE_SIZE_KB = 6
    PROPERTIES_PER_BUFFER_CACHE_SIZE_KB = 7
    PROPERTIES_MAX_DEVICE_PINNED_MEM_SIZE_KB = 8
    PROPERTIES_IO_BATCHSIZE = 9
    POLLTHRESHOLD_SIZE_KB = 10
    PROPERTIES_BATCH_IO_TIMEOUT_MS = 11


class BoolParameter(IntEnum):
    """``CUFileBoolConfigParameter_t``."""

    PROPERTIES_USE_POLL_MODE = 0
    PROPERTIES_ALLOW_COMPAT_MODE = 1
    FORCE_COMPAT_MODE = 2
    FS_MISC_API_CHECK_AGGRESSIVE = 3
    EXECUTION_PARALLEL_IO = 4
    PROFILE_NVTX = 5
    PROPERTIES_ALLOW_SYSTEM_MEMORY = 6
    USE_PCIP2PDMA = 7
    PREFER_IO_URING = 8
    FORCE_ODIRECT_MODE = 9
    SKIP_TOPOLOGY_DETECTION = 10
    STREAM_MEMOPS_BYPASS = 11


class StringParameter(IntEnum):
    """``CUFileStringConfigParameter_t``."""

    LOGGING_LEVEL = 0
    ENV_LOGFILE_PATH = 1
    LOG_DIR = 2


class StatsLevel(IntEnum):
    """How much libcufile counts; each level includes the ones below and costs more."""

    OFF = 0
    BASIC = 1
    HISTOGRAMS = 2
    PER_GPU = 3


class OpCounter(ctypes.Structure):
    """``CUfileOpCounter_t``: calls that succeeded and that failed."""

    _fields_ = [("ok", ctypes.c_uint64), ("err", ctypes.c_uint64)]


class StatsLevel1(ctypes.Structure):
    """``CUfileStatsLevel1_t``: counters, bytes, bytes per second and microseconds."""

    _fields_ = [
        *(
            (name, OpCounter)
            for name in (
                "read_ops",
                "write_ops",
                "hdl_register_ops",
                "hdl_deregister_ops",
                "buf_register_ops",
                "buf_deregister_ops",
            )
        ),
        *(
            (name, ctypes.c_uint64)
            for name in (
                "read_bytes",
                "write_bytes",
                "read_bw_bytes_per_sec",
                "write_bw_bytes_per_sec",
                "read_lat_avg_us",
                "write_lat_avg_us",
                "read_ops_per_sec",
                "write_ops_per_sec",
                "read_lat_sum_us",
                "write_lat_sum_us",
            )
        ),
        *(
            (name, OpCounter)
            for name in (
                "batch_submit_ops",
                "batch_complete_ops",
                "batch_setup_ops",
                "batch_cancel_ops",
                "batch_destroy_ops",
                "batch_enqueued_ops",
                "batch_posix_enqueued_ops",
                "batch_processed_ops",
                "batch_posix_processed_ops",
                "batch_nvfs_submit_ops",
                "batch_p2p_submit_ops",
                "batch_aio_submit_ops",
                "batch_iouring_submit_ops",
                "batch_mixed_io_submit_ops",
                "batch_total_submit_ops",
            )
        ),
        *(
            (name, ctypes.c_uint64)
            for name in (
                "batch_read_bytes",
                "batch_write_bytes",
                "batch_read_bw_bytes",
                "batch_write_bw_bytes",
                "batch_submit_lat_avg_us",
                "batch_completion_lat_avg_us",
                "batch_submit_ops_per_sec",
                "batch_complete_ops_per_sec",
                "batch_submit_lat_sum_us",
                "batch_completion_lat_sum_us",
                "last_batch_read_bytes",
                "last_batch_write_bytes",
            )
        ),
    ]


class StatsLevel2(ctypes.Structure):
    """``CUfileStatsLevel2_t``: level 1 and histograms of transfer sizes."""

    _fields_ = [
        ("basic", StatsLevel1),
        ("read_size_kb_hist", ctypes.c_uint64 * 32),
        ("write_size_kb_hist", ctypes.c_uint64 * 32),
    ]


class PerGpuStats(ctypes.Structure):
    """``CUfilePerGpuStats_t``: what one GPU moved, and by which road (``n_p2p``, ``n_nvfs``, ``n_posix``)."""

    _fields_ = [
        # Bytes, not a string: c_char would stop at the first zero of the UUID.
        ("uuid", ctypes.c_uint8 * 16),
        *(
            (name, ctypes.c_uint64)
            for name in (
                "read_bytes",
                "read_bw_bytes_per_sec",
                "read_utilization",
                "read_duration_us",
                "n_total_reads",
                "n_p2p_reads",
                "n_nvfs_reads",
                "n_posix_reads",
                "n_unaligned_reads",
                "n_dr_reads",
                "n_sparse_regions",
                "n_inline_regions",
                "n_reads_err",
                "writes_bytes",
                "write_bw_bytes_per_sec",
                "write_utilization",
                "write_duration_us",
                "n_total_writes",
                "n_p2p_writes",
                "n_nvfs_writes",
                "n_posix_writes",
                "n_unaligned_writes",
                "n_dr_writes",
                "n_writes_err",
                "n_mmap",
                "n_mmap_ok",
                "n_mmap_err",
                "n_mmap_free",
                "reg_bytes",
            )
        ),
    ]


class StatsLevel3(ctypes.Structure):
    """``CUfileStatsLevel3_t``: level 2 and, for at most 16 GPUs, one record each."""

    _fields_ = [("detailed", StatsLevel2), ("num_gpus", ctypes.c_uint32), ("per_gpu_stats", PerGpuStats * 16)]
