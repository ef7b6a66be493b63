"""What is called of CuPy is there, with these arguments: compared with CuPy itself, which a host without a GPU loads.

pip install cupy-cuda13x
"""

import pytest

cupy = pytest.importorskip("cupy", reason="an extra")


def arguments(function) -> list[str]:
    """Return the names of arguments by the first line of what Cython makes the documentation."""
    line = (function.__doc__ or "").strip().splitlines()[0]
    words = line[line.index("(") + 1 : line.rindex(")")].split(",")
    return [word.split("=")[0].split()[-1] for word in words if word.strip() not in ("self", "")]


def test_memory_and_streams_have_what_is_called_of_them():
    cuda, runtime = cupy.cuda, cupy.cuda.runtime
    assert arguments(cuda.UnownedMemory) == ["ptr", "size", "owner", "device_id"]
    assert arguments(cuda.MemoryPointer) == ["mem", "offset"]
    assert arguments(cupy.ndarray)[:3] == ["shape", "dtype", "memptr"]
    assert "non_blocking" in arguments(cuda.Stream.__init__)
    assert arguments(cuda.Device.use) == []
    assert arguments(cuda.driver.get_build_version) == [] and runtime.is_hip in (True, False)
    assert arguments(runtime.malloc) == ["size"] and arguments(runtime.free) == ["ptr"]
    assert arguments(runtime.ipcGetMemHandle) == ["devPtr"]
    assert arguments(runtime.ipcOpenMemHandle)[0] == "handle"
    assert arguments(runtime.ipcCloseMemHandle) == ["devPtr"]
