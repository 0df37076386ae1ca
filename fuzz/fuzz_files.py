"""Coverage-guided fuzzing of everything that parses files from strangers. Needs atheris.

    python fuzz/fuzz_files.py zip -max_total_time=60 fuzz/corpus/zip

Targets: ``zip`` (directory, headers and index of a torch file), ``pickle`` (the inert index and the plain rebuild),
``safetensors`` (the header) and ``dcp`` (the metadata of a distributed checkpoint). A target fails if anything but the
documented errors comes out, if something of the file runs, or if memory grows far beyond the input.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import resource
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import atheris

with atheris.instrument_imports(include=["torchdirect"]):
    from torchdirect.dcp.metadata import parse_metadata, stored_files
    from torchdirect.errors import CorruptCheckpointError
    from torchdirect.formats import safetensors, torch_zip
    from torchdirect.formats.pickle_index import UnsupportedPickleError, index_pickle, rebuild_plain
    from torchdirect.names import describer

_REFUSALS = (CorruptCheckpointError, UnsupportedPickleError, torch_zip.NotCarriedError)


def _refuse_import(name: str, *_: Any, **__: Any) -> Any:
    raise AssertionError(f"the file imports {name}")


class _NothingRuns:
    """While a file is parsed, nothing can be imported, opened or executed."""

    _names = ("__import__", "eval", "exec", "compile")

    def __enter__(self) -> None:
        self._saved = {name: getattr(builtins, name) for name in self._names}
        for name in self._names:
            setattr(builtins, name, _refuse_import)

    def __exit__(self, *_: object) -> None:
        for name, value in self._saved.items():
            setattr(builtins, name, value)


def fuzz_zip(data: bytes) -> None:
    try:
        index = torch_zip.read_index(lambda offset, nbytes: data[offset : offset + nbytes], len(data), "file")
    except _REFUSALS:
        return
    for storage in index.storages:
        assert 0 <= storage.file_offset <= storage.file_offset + storage.nbytes <= len(data)


def fuzz_pickle(data: bytes) -> None:
    try:
        with _NothingRuns():
            index = index_pickle(data)
    except _REFUSALS:
        return
    describer(index.root, [reference.key for reference in index.references])
    if index.plain and not index.references:
        with contextlib.suppress(Exception):  # torch.load gives the verdict then
            rebuild_plain(index, lambda _: None)  # type: ignore[arg-type, return-value]


def fuzz_safetensors(data: bytes) -> None:
    fd = os.memfd_create("fuzz")
    try:
        os.write(fd, data)
        try:
            index = safetensors.read_index(lambda at, n: os.pread(fd, n, at), fd, len(data), "file")
        except _REFUSALS:
            return
        for tensor in index.tensors.values():
            assert 0 <= tensor.file_offset <= tensor.file_offset + tensor.nbytes <= len(data)
    finally:
        os.close(fd)


def fuzz_dcp(data: bytes) -> None:
    with _NothingRuns():
        with contextlib.suppress(CorruptCheckpointError):
            stored_files(data, "file")
        try:
            metadata = parse_metadata(data, "file")
        except CorruptCheckpointError:
            return
    for index, info in metadata.storage_data.items():
        assert isinstance(index.fqn, str)
        assert not os.path.normpath(os.path.join("/folder", info.relative_path)).startswith(("/..", "//"))
        assert os.path.normpath(os.path.join("/folder", info.relative_path)).startswith("/folder/")
        assert info.offset >= 0 and info.length >= 0


TARGETS: dict[str, Callable[[bytes], None]] = {
    "zip": fuzz_zip,
    "pickle": fuzz_pickle,
    "safetensors": fuzz_safetensors,
    "dcp": fuzz_dcp,
}


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        raise SystemExit(f"usage: fuzz_files.py {'|'.join(TARGETS)} [libFuzzer options] [corpus …]")
    target = TARGETS[sys.argv.pop(1)]
    limit = 4 << 30
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    tempfile.tempdir = None
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
