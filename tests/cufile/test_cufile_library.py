from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cufile_double import CuFileDouble
from torchdirect.cufile import driver, library, stream, structs
from torchdirect.cufile.errors import CuFileNotFoundError, CuFileUnsupportedError
from torchdirect.cufile.handle import FileHandle


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without any libcufile."""
    for name in (library.ENVIRONMENT_VARIABLE, "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(library, "_loaded_already", list)
    monkeypatch.setattr(library, "_loader_directories", lambda: iter(()))
    monkeypatch.setattr(library, "_toolkit_directories", lambda: iter(()))
    monkeypatch.setattr(library, "_pip_directories", lambda: iter([str(tmp_path / "nvidia/cu13/lib")]))
    library.unload()
    return tmp_path


def test_nothing_found_names_the_places(nowhere: Path) -> None:
    assert library.find() is None
    assert not library.has("cuFileRead")
    with pytest.raises(CuFileNotFoundError, match=r"looked at .*nvidia/cu13/lib.*TORCHDIRECT_LIBCUFILE"):
        library.load()


def test_pip_package_is_found_and_soname_zero_preferred(nowhere: Path) -> None:
    folder = nowhere / "nvidia/cu13/lib"
    folder.mkdir(parents=True)
    for name in ("libcufile.so.1", "libcufile_rdma.so.1", "libcufile.so"):
        (folder / name).touch()
    assert library.find() == library.LibraryLocation(str(folder / "libcufile.so.1"), "pip")
    (folder / "libcufile.so.0").touch()
    assert library.find() == library.LibraryLocation(str(folder / "libcufile.so.0"), "pip")
    with pytest.raises(CuFileNotFoundError, match="cannot be loaded"):
        library.load()


def test_toolkit_and_loader_directories(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "targets/x86_64-linux/lib").mkdir(parents=True)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    directories = list(library._toolkit_directories())
    assert directories[:2] == [str(tmp_path / "lib64"), str(tmp_path / "targets/x86_64-linux/lib")]
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}::/other")
    assert list(library._loader_directories())[:2] == [str(tmp_path), "/other"]
    assert any(d.endswith("nvidia/cu13/lib") for d in library._pip_directories())


def test_bad_environment_variable_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library.unload()
    monkeypatch.setenv(library.ENVIRONMENT_VARIABLE, str(tmp_path / "missing.so"))
    with pytest.raises(CuFileNotFoundError, match=r"TORCHDIRECT_LIBCUFILE=.*missing.so"):
        library.load()
    (tmp_path / "text.so").write_text("no library")
    monkeypatch.setenv(library.ENVIRONMENT_VARIABLE, str(tmp_path / "text.so"))
    with pytest.raises(CuFileNotFoundError, match=r"text\.so.*TORCHDIRECT_LIBCUFILE"):
        library.load()


def test_another_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import _ctypes

    library.unload()
    monkeypatch.setenv(library.ENVIRONMENT_VARIABLE, _ctypes.__file__)
    with pytest.raises(CuFileNotFoundError, match="is no libcufile"):
        library.load()


def test_loaded_library_is_found_first(cufile_double: CuFileDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(library.ENVIRONMENT_VARIABLE)
    location = library.find()
    assert location is not None and location.source == "loaded"


def test_load_is_cached_and_thread_safe(cufile_double: CuFileDouble) -> None:
    assert library.loaded() is None
    found: list[library.Library] = []
    threads = [threading.Thread(target=lambda: found.append(library.load())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1
    assert library.loaded() is found[0]
    assert found[0].location == library.LibraryLocation(str(cufile_double.path), "environment")


def test_double_has_every_function(cufile_double: CuFileDouble) -> None:
    assert library.load().features == frozenset(library._PROTOTYPES)


def test_old_library(cufile_double_old: CuFileDouble, data_file: Path) -> None:
    assert library.has("cuFileRead")
    assert not library.has("cuFileReadAsync")
    with pytest.raises(CuFileUnsupportedError, match="has no cuFileGetVersion; install a newer"):
        driver.version()
    with pytest.raises(CuFileUnsupportedError):
        driver.get_parameter(structs.SizeParameter.PROPERTIES_IO_BATCHSIZE)
    with pytest.raises(CuFileUnsupportedError):
        stream.RegisteredStream(1)
    with data_file.open("rb") as file, FileHandle(file.fileno()) as handle, pytest.raises(CuFileUnsupportedError):
        stream.read_async(handle, 4096, 1, stream=0)
    assert stream.pending() == stream.registered() == 0
    cufile_double_old.assert_no_leaks()


@pytest.mark.parametrize(("packed", "text"), [(1150, "1.15.0"), (1070, "1.7.0"), (1141, "1.14.1"), (2000, "2.0.0")])
def test_version_number(packed: int, text: str) -> None:
    assert str(library.Version.from_packed(packed)) == text


def test_binding_imports_no_torch() -> None:
    # The package itself is loaded without its parent, which is free to import torch.
    folder = str(Path(library.__file__).parent)
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('alone', {folder!r} + '/__init__.py', "
        f"submodule_search_locations=[{folder!r}])\n"
        "module = importlib.util.module_from_spec(spec); sys.modules['alone'] = module\n"
        "spec.loader.exec_module(module)\n"
        "assert 'torch' not in sys.modules and module.library.loaded() is None\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
