from __future__ import annotations

import errno
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchdirect.cufile import errors
from torchdirect.cufile.errors import CuFileError, CuFileUnavailableError


def test_table_has_every_code_of_the_header() -> None:
    # cufile.h of 1.15 defines 5001 to 5050 without 5021 and 5032.
    assert sorted(errors.CODES) == [5000 + n for n in range(1, 51) if n not in (21, 32)]
    assert all(row.name.startswith("CU_FILE_") and row.meaning and row.remedy for row in errors.CODES.values())
    assert len({row.name for row in errors.CODES.values()}) == len(errors.CODES)


@given(st.integers(min_value=0, max_value=2**62))
def test_byte_counts_are_no_failure(value: int) -> None:
    assert errors.decode_transfer(value, errno.EIO) is None
    assert errors.decode_completion(value) is None


@given(st.integers(min_value=5001, max_value=6000), st.integers(min_value=0, max_value=999))
def test_cufile_codes_decode_in_all_three_conventions(code: int, cuda: int) -> None:
    status = errors.decode_status(code, cuda)
    transfer = errors.decode_transfer(-code, errno.ENOSPC)
    completion = errors.decode_completion(-code)
    assert status is not None and transfer is not None and completion is not None
    assert status.code == transfer.code == completion.code == code
    assert transfer == completion
    assert status.cuda_error == cuda
    expected = errors.CODES[code].name if code in errors.CODES else f"CU_FILE_ERROR_{code}"
    assert status.name == expected


@given(st.sampled_from(sorted(errno.errorcode)))
def test_errno_decodes(number: int) -> None:
    transfer = errors.decode_transfer(-1, number)
    completion = errors.decode_completion(-number)
    assert transfer is not None and completion is not None
    assert (transfer.code, transfer.errno, transfer.name) == (0, number, errno.errorcode[number])
    assert (completion.code, completion.errno, completion.name) == (0, number, errno.errorcode[number])


def test_named_completions() -> None:
    eio, internal = errors.decode_completion(-5), errors.decode_completion(-5030)
    assert eio is not None and eio.name == "EIO"
    assert internal is not None and internal.name == "CU_FILE_INTERNAL_ERROR"


@given(st.integers(min_value=-9999, max_value=9999).filter(bool))
def test_status_takes_the_absolute_value_as_the_header_does(err: int) -> None:
    assert errors.decode_status(err) == errors.decode_status(-err) is not None


def test_status_success_and_missing_errno() -> None:
    assert errors.decode_status(0, 700) is None
    failure = errors.decode_transfer(-1, 0)
    assert failure is not None and failure.errno == errno.EIO and "without setting errno" in failure.meaning


def test_message_has_name_meaning_remedy_path_and_cuda_error() -> None:
    with pytest.raises(CuFileError) as caught:
        errors.check_status(5011, 2, "cuFileBufRegister", "/data/x", "64 bytes")
    error = caught.value
    assert (error.code, error.name, error.cuda_error) == (5011, "CU_FILE_CUDA_DRIVER_ERROR", 2)
    assert (error.function, error.path, error.errno) == ("cuFileBufRegister", "/data/x", errno.EIO)
    text = str(error)
    for part in ("cuFileBufRegister", "'/data/x'", "(5011)", "CUDA_ERROR_OUT_OF_MEMORY", "64 bytes", error.remedy):
        assert part in text


def test_errors_survive_pickling() -> None:
    failure = errors.describe_errno(errno.ENOSPC)
    error = pickle.loads(pickle.dumps(CuFileError(failure, "cuFileWrite", "/x", "d")))
    assert (error.errno, error.failure, str(error)) == (
        errno.ENOSPC,
        failure,
        str(CuFileError(failure, "cuFileWrite", "/x", "d")),
    )
    other = pickle.loads(pickle.dumps(CuFileUnavailableError("why", "what")))
    assert (other.reason, other.remedy, str(other)) == ("why", "what", "why; what")
