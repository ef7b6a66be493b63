"""What is called of CuPy is there, with these arguments: compared with CuPy itself, which a host without a GPU loads.

pip install cupy-cuda13x nvidia-nccl-cu13
"""

import pytest

cupy = pytest.importorskip("cupy", reason="an extra")


def arguments(function) -> list[str]:
    """Return the names of arguments by the first line of what Cython makes the documentation."""
    line = (function.__doc__ or "").strip().splitlines()[0]
    words = line[line.index("(") + 1 : line.rindex(")")].split(",")
    return [word.split("=")[0].split()[-1] for word in words if word.strip() not in ("self", "")]


def test_the_library_of_collectives_has_what_is_called_of_it():
    from cupy.cuda import nccl

    assert nccl.available and nccl.get_version() > 22000
    for name in ("INT8", "UINT8", "INT32", "INT64", "FLOAT32", "FLOAT64", "SUM", "MAX", "MIN"):
        assert isinstance(getattr(nccl, f"NCCL_{name}"), int)
    assert arguments(nccl.get_unique_id) == arguments(nccl.groupStart) == arguments(nccl.groupEnd) == []
    made = nccl.NcclCommunicator
    assert arguments(made)[:3] == ["ndev", "commId", "rank"]
    sums = ["sendbuf", "recvbuf", "count", "datatype", "op"]
    assert arguments(made.allReduce) == [*sums, "stream"]
    assert arguments(made.reduce) == [*sums, "root", "stream"]
    assert arguments(made.reduceScatter) == ["sendbuf", "recvbuf", "recvcount", "datatype", "op", "stream"]
    assert arguments(made.allGather) == ["sendbuf", "recvbuf", "count", "datatype", "stream"]
    assert arguments(made.broadcast) == ["sendbuff", "recvbuff", "count", "datatype", "root", "stream"]
    assert arguments(made.send) == ["sendbuf", "count", "datatype", "peer", "stream"]
    assert arguments(made.recv) == ["recvbuf", "count", "datatype", "peer", "stream"]
    for name in ("abort", "destroy", "check_async_error"):
        assert arguments(getattr(made, name)) == []


def test_memory_and_streams_have_what_is_called_of_them():
    cuda, runtime = cupy.cuda, cupy.cuda.runtime
    assert arguments(cuda.UnownedMemory) == ["ptr", "size", "owner", "device_id"]
    assert arguments(cuda.MemoryPointer) == ["mem", "offset"]
    assert arguments(cupy.ndarray)[:3] == ["shape", "dtype", "memptr"]
    assert "non_blocking" in arguments(cuda.Stream.__init__)
    assert arguments(cuda.Device.use) == []
    assert arguments(runtime.malloc) == ["size"] and arguments(runtime.free) == ["ptr"]
    assert arguments(runtime.ipcGetMemHandle) == ["devPtr"]
    assert arguments(runtime.ipcOpenMemHandle)[0] == "handle"
    assert arguments(runtime.ipcCloseMemHandle) == ["devPtr"]
