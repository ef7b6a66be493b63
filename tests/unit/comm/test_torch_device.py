"""Devices of every maker behind one class, on modules of torch that are not there; and what goes wrong without it."""

import socket
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch._C._distributed_c10d import ErrorType
from torch.distributed import HashStore
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.comm import bind
from hpctrain.comm.accelerators.cpu import DONE, CpuAccelerator
from hpctrain.comm.accelerators.kinds import (
    CUDA,
    KINDS,
    ROCM,
    Ability,
    DetectedDevice,
    may_be_there,
    set_environment,
    use_device_early,
)
from hpctrain.comm.accelerators.torch_device import (
    EXACT_BYTES,
    FRAGMENTATION_SHARE,
    LIBRARY_BYTES,
    TorchAccelerator,
    check_cupy,
    register_memory,
)
from hpctrain.comm.bind import choose_devices, native_ability
from hpctrain.comm.collectives.flat import SilentCollectives
from hpctrain.comm.collectives.native import Connection, connect_native, open_store, own_addresses, reachable
from hpctrain.comm.probe import device_timing
from hpctrain.comm.probe.device_timing import measure_overlap
from hpctrain.comm.progress.instruments import Instruments
from hpctrain.comm.progress.lanes import ProgressEngine
from hpctrain.comm.progress.operation import Operation
from hpctrain.comm.topology import Place, Topology
from hpctrain.comm.transports import cuda_aware
from hpctrain.comm.transports.abilities import FamilyAbilities, message_route
from hpctrain.comm.transports.cuda_aware import asked_direct, exchange_in_ring
from hpctrain.comm.waiting import Condition, Patience, Phase
from hpctrain.config.errors import CommError, RankLossError, TopologyError
from hpctrain.engine.step.loss_scale import gradient_of_loss
from tests.ranks.fake_devices import FakeAccelerator, FakeStream
from tests.unit.fake_torch import GIB, FakeCupy, FakePlace, FakeTorchModule

SOON = Patience(Phase("a test", 20.0, "nothing"))


def device(kind=CUDA, index=1, sharers=1, **module) -> tuple[TorchAccelerator, FakeTorchModule]:
    torch_module = FakeTorchModule(**module)
    return TorchAccelerator(kind, index, "h200", sharers, torch_module, FakeCupy()), torch_module


def test_every_kind_is_an_entry_with_what_differs():
    assert set(KINDS) == {"cuda", "rocm", "xpu", "npu"}
    assert (ROCM.torch_type, ROCM.library, CUDA.library) == ("cuda", "RCCL", "NCCL")
    for kind in KINDS.values():
        if kind.plugin:  # which gives torch the name
            kind = kind._replace(torch_type="privateuseone")
        made, module = device(kind)
        assert made.kind == kind.name and made.device.type == kind.torch_type
        made.use()
        assert module.current_device() == 1
        assert made.queued().query() and not made.is_on_device(torch.zeros(1))
    assert not may_be_there(KINDS["xpu"]._replace(driver_files=("/dev/null",), build="+none"))


def test_memory_is_what_the_allocator_has_reserved_and_a_share_where_ranks_share():
    made, module = device()
    module.reserved, module.peak_reserved = 3 * GIB, 5 * GIB
    assert made.memory() == (140 * GIB, 3 * GIB, 5 * GIB)
    made, module = device(sharers=4)
    assert made.memory().total == 35 * GIB


def test_context_library_and_fragmentation_are_reserved():
    made, _ = device(total=80 * GIB, context=2 * GIB)
    made._outside = 2 * GIB  # as `bind` measures it on a real device
    assert made.reserved_bytes() == 2 * GIB + LIBRARY_BYTES + int(FRAGMENTATION_SHARE * 80 * GIB)
    made, _ = device(total=80 * GIB, sharers=2)
    made._outside = 2 * GIB
    assert made.reserved_bytes() == GIB + int(FRAGMENTATION_SHARE * 40 * GIB), "who shares has no library"


def test_no_two_of_forty_routes_have_one_stream():
    made, _ = device()
    streams = [made.new_stream() for _ in range(40)]
    assert len({stream.cuda_stream for stream in streams}) == 40
    assert made.launches.stream.cuda_stream not in {stream.cuda_stream for stream in streams}


def test_a_new_thread_has_device_0_until_it_uses_its_own():
    made, module = device(index=1)
    made.use()
    seen = []
    progress = ProgressEngine(threaded=True, enter=made.use)
    lane = progress.add_lane()

    def steps():
        passed = []

        def looked() -> bool:  # by the thread that moves lanes, and by this one, which has its device
            if threading.current_thread() is not threading.main_thread():
                passed.append(module.current_device())
            return bool(passed)

        yield Condition(looked, "the other thread")
        seen.extend(passed)

    operation = Operation(Instruments(), "test", 0, steps(), SOON, is_overlapped=True)
    lane.begin(operation)
    deadline = time.monotonic() + 20
    while not operation.ended and time.monotonic() < deadline:
        time.sleep(0.001)
    progress.close()
    assert seen and set(seen) == {1}


def test_mpi_is_given_device_memory_as_an_array_of_cupy_over_the_same_bytes():
    made, _ = device()
    data = torch.arange(10, dtype=torch.uint8)
    made.is_on_device = lambda tensor: True
    view = made.view_for_mpi(data)
    assert isinstance(view, np.ndarray) and view.ctypes.data == data.data_ptr()
    view[3] = 77
    assert data[3] == 77


def test_a_cupy_of_another_rocm_than_torchs_is_refused():
    def of(version: int, is_hip: bool) -> SimpleNamespace:
        driver = SimpleNamespace(get_build_version=lambda: version)
        return SimpleNamespace(driver=driver, runtime=SimpleNamespace(is_hip=is_hip))

    check_cupy(of(7_00_51831, True), "7.2.53211-e1a6bc5663")
    check_cupy(of(13000, False), None)
    with pytest.raises(TopologyError, match="CuPy is built for ROCm 6, and torch .* for ROCm 7: install the CuPy of"):
        check_cupy(of(6_04_43482, True), "7.2.53211-e1a6bc5663")
    with pytest.raises(TopologyError, match="CuPy is built for CUDA, and torch .* for ROCm 7"):
        check_cupy(of(13000, False), "7.0")


def test_memory_that_is_exported_is_opened_and_given_back_by_its_address():
    made, _ = device()
    exported = made.export_memory(100)
    assert exported is not None, "it has CuPy"
    imported = made.import_memory(exported.handle, 100)
    imported.fill_(7)
    assert exported.memory.tolist() == [7] * 100 and len(made.cupy.opened) == len(made.cupy.memory) == 1
    made.close_memory(imported)
    made.free_memory(exported.memory)
    assert not made.cupy.opened and not made.cupy.memory
    made, _ = device(KINDS["xpu"])
    made._given_cupy = None
    assert made.export_memory(100) is None


def test_large_host_buffers_are_pinned_as_they_are_until_nothing_of_them_is_used():
    made, module = device()
    registered: dict[int, int] = {}

    def register(address: int, num_bytes: int, flags: int) -> int:
        registered[address] = num_bytes
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=registered.pop)
    module.cudart = lambda: runtime
    buffer = made.host_buffer(EXACT_BYTES + 12)
    part = buffer[EXACT_BYTES:].fill_(3)
    assert registered == {buffer.data_ptr(): EXACT_BYTES + 12}
    del buffer
    assert registered and part.tolist() == [3] * 12
    del part
    assert not registered
    runtime.cudaHostRegister = lambda *_: 2
    assert register_memory(1 << 12, runtime) is None


def test_products_are_summed_in_fp32(monkeypatch):
    made, _ = device()
    monkeypatch.setattr(made, "_measure_outside", lambda: 0)
    products = torch.backends.cuda.matmul
    deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    try:
        made.bind()
        assert not products.allow_bf16_reduced_precision_reduction
        assert not products.allow_fp16_reduced_precision_reduction
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.autograd.set_multithreading_enabled(True)
        torch.set_num_threads(threads)


def test_a_waiting_stream_is_not_a_waiting_host():
    made, module = device()
    later = FakePlace(passed=False)
    with made.on(made.new_stream()):
        made.wait_for(later)
        assert module.current_stream().waited == [later]
    made.wait_for(DONE)
    assert module.current_stream().waited == []


def test_what_is_offloaded_has_streams_of_its_own_and_waits_for_what_was_computed():
    """The streams of messages never wait for computation, and each direction has one."""
    made, module = device()
    made.is_on_device = lambda tensor: tensor is on_device  # both are in host memory here
    on_device, on_host = torch.arange(4), torch.zeros(4, dtype=torch.int64)
    computed, used = FakePlace(passed=False), []
    real = module.stream

    def stream(which):
        used.append(which)
        return real(which)

    module.stream = stream
    assert made.move(on_host, on_device, computed) is not DONE
    made.move(on_device, on_host, DONE)
    assert on_host.tolist() == [0, 1, 2, 3]
    out, back = used
    assert out.waited == [computed] and back.waited == []
    assert len({id(each) for each in (out, back, *made._copy_streams)}) == 4


class AllReduceInFlight:
    """A group whose all-reduce takes a while on a stream of its own, whatever the rank computes."""

    is_overlapped = True

    def __init__(self, accelerator: FakeAccelerator, seconds: float):
        self._accelerator, self._seconds = accelerator, seconds
        self._stream = accelerator.new_stream()

    def start_all_reduce(self, tensor):
        end = time.monotonic() + self._seconds
        event = self._stream.add(lambda: time.sleep(max(0.0, end - time.monotonic())))

        class Moving:
            @property
            def ended(self):
                return time.monotonic() >= end

            def wait(self):
                event.force()

        return Moving()

    def all_reduce(self, tensor, op="sum"):
        return tensor

    def barrier(self):
        pass


def test_the_overlap_slowdown_leaves_out_the_wait_for_the_collective_itself():
    accelerator = FakeAccelerator()
    accelerator.measured_dtypes = ("fp32",)
    with patch.multiple(device_timing, PRODUCT_SIZE=64, MOVED_BYTES=4096):
        result = measure_overlap(AllReduceInFlight(accelerator, 0.05), accelerator, 1 << 30, 0.3)
    # A product takes 10 us here. Who waits for the whole device computes one of them in 0.05 s.
    assert result is not None and result < 50


def test_who_computes_waits_for_his_own_stream_alone():
    accelerator = FakeAccelerator()
    other = accelerator.new_stream()
    late = other.add(lambda: None)
    accelerator.finish_queued()
    assert other.pending == 1, "nobody looked at the collective's stream"
    accelerator.synchronize()
    assert other.pending == 0 and late.query()


class Noticing:
    """A group of the library: an error comes by itself, and shutting down waits for ever."""

    def __init__(self, error: ErrorType = ErrorType.SUCCESS, abort_seconds: float = 0.0):
        self.error, self.abort_seconds = error, abort_seconds
        self.aborted = self.shut_down = 0
        self.goes_on = threading.Event()

    def get_error(self) -> ErrorType:
        return ErrorType.SUCCESS if self.aborted else self.error

    def abort(self):
        self.aborted += 1
        self.goes_on.wait(self.abort_seconds)

    def shutdown(self):
        self.shut_down += 1


def test_an_error_that_the_library_notices_ends_the_wait():
    group = Noticing(ErrorType.REMOTE_ERROR)
    connection = Connection("NCCL", group, CpuAccelerator().launches)
    end = time.monotonic() + 20
    with pytest.raises(CommError, match="NCCL reports: REMOTE_ERROR"):
        while time.monotonic() < end:
            connection.check()
            time.sleep(0.01)
    connection.abort()
    while not group.aborted and time.monotonic() < end:  # by the thread that noticed it
        time.sleep(0.01)
    connection.shutdown()
    assert (group.aborted, group.shut_down) == (1, 0), "it is left once, and never shut down"


def test_who_leaves_in_an_error_aborts_and_never_shuts_down(monkeypatch):
    monkeypatch.setattr("hpctrain.comm.collectives.native.ABORT_SECONDS", 0.2)
    group = Noticing(abort_seconds=60.0)
    references = sys.getrefcount(group)
    start = time.monotonic()
    connection = Connection("NCCL", group, CpuAccelerator().launches)
    connection.abort()
    assert time.monotonic() - start < 5, "an abort that hangs is not waited for"
    assert group.aborted == 1 and not group.shut_down
    group.goes_on.set()
    for thread in [thread for thread in threading.enumerate() if thread.name == "NCCL abort"]:
        thread.join()
    del connection, thread
    assert sys.getrefcount(group) > references, "nor released at the interpreter's exit"


class RefusingGroups:
    """Torch's class of process groups, for a library that refuses the ranks."""

    Options = SimpleNamespace

    def __init__(self, *_):
        raise RuntimeError("NCCL_ERROR_INVALID_USAGE: Duplicate GPU detected")


MEMBERS = SimpleNamespace(rank=0, size=2, bcast=lambda value: value, allgather=lambda text: [text, text])
"""What two ranks tell each other, where both say the same."""


def test_a_library_that_refuses_the_ranks_ends_the_start_with_its_words():
    with pytest.raises(CommError, match="NCCL refuses these 2 ranks .*; NCCL_DEBUG=INFO shows why") as refused:
        connect_native(MEMBERS, FakeAccelerator(), HashStore(), SilentCollectives(0, 2), groups=RefusingGroups)
    assert "RuntimeError: NCCL_ERROR_INVALID_USAGE" in str(refused.value)


def test_a_library_is_not_blamed_for_the_loss_of_a_rank():
    failures = [(RankLossError, "rank 1 was killed"), None]
    members = SimpleNamespace(rank=0, size=2, bcast=lambda value: value, allgather=lambda failure: failures)
    with pytest.raises(RankLossError, match="^rank 1 was killed$"):
        connect_native(members, FakeAccelerator(), HashStore(), SilentCollectives(0, 2), groups=RefusingGroups)


def test_without_a_store_all_ranks_leave(monkeypatch):
    def without_network(*_, **__):
        raise ConnectionError("no network")

    monkeypatch.setattr("hpctrain.comm.collectives.native.dist.TCPStore", without_network)
    with pytest.raises(CommError, match="ConnectionError: no network"):
        open_store(MEMBERS, "here")


def test_other_hosts_try_each_name_and_address_of_the_first_one():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert reachable(["no-such-host.invalid", "127.0.0.1"], port) == "127.0.0.1"
    with pytest.raises(CommError, match=r"does not reach .* on port \d+ \(no-such-host.invalid: .*; 127.0.0.1: .*\)"):
        reachable(["no-such-host.invalid", "127.0.0.1"], port)
    assert own_addresses(), "a host has at least a name"


def test_variables_of_a_site_that_would_end_ranks_by_torch_are_replaced_with_a_word():
    environment = {"NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "NCCL_NVLS_ENABLE": "1"}
    replaced = set_environment(KINDS["cuda"], True, environment)
    assert replaced == [
        "TORCH_NCCL_ASYNC_ERROR_HANDLING=3 of this site is set to 0",
        "NCCL_BLOCKING_WAIT=1 of this site is set to 0",
    ]
    assert environment["TORCH_FR_BUFFER_SIZE"] == environment["TORCH_NCCL_BLOCKING_WAIT"] == "0"
    assert environment["NCCL_NVLS_ENABLE"] == "1", "what a site chose for speed stays"
    assert "NCCL_ASYNC_ERROR_HANDLING" not in environment, "torch complains where it is set"


@pytest.mark.parametrize("in_one_order", [True, False])
def test_switches_may_sum_unless_sums_have_one_order(in_one_order):
    environment: dict[str, str] = {}
    assert not set_environment(KINDS["cuda"], in_one_order, environment)
    assert environment.get("NCCL_NVLS_ENABLE") == ("0" if in_one_order else None)


def test_a_family_without_its_library_is_refused_unless_it_is_to_do_without(monkeypatch):
    made, _ = device()
    missing = Ability(False, "torch has no ProcessGroupNCCL")
    monkeypatch.setattr(bind, "library_ability", lambda kind: missing)
    with pytest.raises(
        TopologyError, match="2 ranks of family 'h200' have no NCCL: torch has no ProcessGroupNCCL; install a torch"
    ):
        native_ability(made, 1, num_ranks=2)
    assert native_ability(made, 1, num_ranks=1) == missing, "a single rank has nobody to sum with"
    assert not native_ability(made, 2, num_ranks=2).works, "sharing was asked for"
    monkeypatch.setenv("HPCTRAIN_NATIVE", "0")
    assert native_ability(made, 1, num_ranks=2) == missing


def test_shared_devices_and_parts_of_them_do_without_the_library():
    made, _ = device(sharers=2)
    assert native_ability(made, 2) == (False, "2 ranks share a device, which NCCL refuses")
    made, _ = device(name="NVIDIA A100-SXM4-80GB MIG 3g.40gb")
    assert "is a part of a device (MIG)" in native_ability(made, 1).reason
    made, _ = device(KINDS["xpu"], sharers=2)
    assert native_ability(made, 2) == (False, "2 ranks share a device, which oneCCL refuses")


def test_ranks_that_share_a_device_use_the_library_where_a_test_asks_for_it(monkeypatch):
    made, _ = device(sharers=2)
    monkeypatch.setenv("HPCTRAIN_NATIVE", "1")
    monkeypatch.setattr(bind, "library_ability", lambda kind: Ability(True, "NCCL 2.28.9"))
    assert native_ability(made, 2) == (
        True,
        "NCCL 2.28.9; 2 ranks share a device, as if on 2 hosts: a test, whose times are no speed",
    )


def test_ranks_share_a_device_only_where_there_are_fewer_devices():
    topology = Topology(tuple(Place("n1", "a", "cuda") for _ in range(3)))
    enough, few = [("u0", "u1", "u2")] * 3, [("u0", "u1")] * 3
    assert choose_devices(topology, enough, sharing=True) == {0: (0, "u0"), 1: (1, "u1"), 2: (2, "u2")}
    assert choose_devices(topology, few, sharing=True)[2] == (0, "u0")


def test_direct_can_be_forced_and_forbidden(monkeypatch):
    assert asked_direct({}) is None and asked_direct({"HPCTRAIN_DIRECT": "auto"}) is None
    assert asked_direct({"HPCTRAIN_DIRECT": "0"}) == (False, "HPCTRAIN_DIRECT=0")
    assert asked_direct({"HPCTRAIN_DIRECT": "1"}) == (True, "HPCTRAIN_DIRECT=1")


class OtherProcess:
    """Messages to another process, and MPI itself: the other one sends `changed` bytes, or none."""

    class Request:
        @staticmethod
        def Testall(requests):  # noqa: N802
            return all(request.done for request in requests)

    BYTE = "byte"

    def __init__(self, changed: bool, silent: bool):
        self._changed, self._silent = changed, silent
        self.rank, self.size, self.members = 0, 2, SimpleNamespace(ranks=(3, 5))
        self.space = SimpleNamespace(mpi=self)
        self.buffer = SimpleNamespace(fromaddress=lambda address, size: (address, size))

    def receive(self, memory, peer):
        import ctypes

        data = cuda_aware._pattern(memory[1], self.members.ranks[peer])
        if self._changed:
            data[5] += 1
        if not self._silent:
            ctypes.memmove(memory[0], data.data_ptr(), memory[1])
        return SimpleNamespace(done=not self._silent, Cancel=lambda: None)

    def send(self, memory, peer):
        return SimpleNamespace(done=True)

    def close(self):
        pass


@pytest.mark.parametrize(
    ("changed", "silent", "expected"),
    [(False, False, "arrived as they were"), (True, False, "arrived changed"), (False, True, "were not there after")],
)
def test_only_messages_between_processes_prove_that_mpi_takes_device_memory(changed, silent, expected):
    messages = OtherProcess(changed, silent)
    result = exchange_in_ring(messages, FakeAccelerator(), timeout_seconds=0.1)
    assert result.works == (not changed and not silent) and expected in result.reason


def test_a_message_of_a_rank_to_itself_is_no_proof(monkeypatch):
    monkeypatch.setattr(bind, "asked_direct", lambda: None)
    monkeypatch.setattr(bind, "probe_direct", lambda *_: Ability(True, "a probe sent it"))
    monkeypatch.setattr(bind, "GroupMessages", lambda members: members)
    monkeypatch.setattr(bind, "exchange_in_ring", lambda *_: Ability(False, "8388608 bytes arrived changed"))
    monkeypatch.setattr(bind, "native_ability", lambda *_: Ability(False, "-"))
    world = SimpleNamespace(
        topology=Topology((Place("n1", "a", "cuda"), Place("n1", "a", "cuda"))),
        all_or_none=nullcontext,
        rank=0,
        space=SimpleNamespace(members=list),
        all_objects=lambda value: [value, value],
    )
    devices = bind.learn_devices(world, FakeAccelerator("a"), 1)
    assert devices.families["a"].direct == (False, "8388608 bytes arrived changed")
    world.topology = Topology((Place("n1", "a", "cuda"),))
    world.all_objects = lambda value: [value]
    assert bind.learn_devices(world, FakeAccelerator("a"), 1).families["a"].direct == bind.ALONE


def test_the_device_is_current_before_mpi_starts():
    code = """
import hpctrain.comm.world as world
from hpctrain.comm.accelerators.kinds import DetectedDevice
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
order = []
world.detect_device = lambda: order.append("detected") or DetectedDevice("cpu", "cpu")
world.use_device_early = lambda device: order.append("used")
real = MPI.Init_thread
class Mpi:
    def __getattr__(self, name):
        return getattr(MPI, name)
    def Init_thread(self, level):
        order.append("mpi")
        return real(level)
import sys
mpi4py.MPI = Mpi()
sys.modules["mpi4py.MPI"] = mpi4py.MPI
world.World.start(watched=False)
assert order == ["detected", "used", "mpi"], order
MPI.Finalize()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_early_device_is_that_of_the_local_rank(monkeypatch):
    module = FakeTorchModule(count=4)
    monkeypatch.setattr("hpctrain.comm.accelerators.kinds.torch_module", lambda kind: module)
    given = DetectedDevice("cuda", "h200")
    assert use_device_early(given, {"SLURM_LOCALID": "6"}) == 2 == module.current_device()
    assert use_device_early(given, {}) is None, "without a local rank another one's could be taken"
    assert use_device_early(DetectedDevice("cpu", "cpu"), {"SLURM_LOCALID": "6"}) is None


def test_hosts_reserve_nothing_and_have_nothing_to_set():
    cpu = CpuAccelerator()
    cpu.use()
    cpu.wait_for(DONE)
    cpu.finish_queued()
    assert cpu.reserved_bytes() == 0 and cpu.view_for_mpi(torch.zeros(1)) is None
    assert bind.DTYPES.keys() >= set(cpu.measured_dtypes)


def test_a_connection_is_not_given_back_while_it_is_looked_at(monkeypatch):
    monkeypatch.setattr("hpctrain.comm.accelerators.launches.LOOK_SECONDS", 0.001)
    looking, freed_under_look = threading.Event(), []

    class Slow(Noticing):
        def get_error(self):
            if threading.current_thread() is not threading.main_thread():
                looking.set()
                time.sleep(0.1)
                freed_under_look.append(self.shut_down)
            return ErrorType.SUCCESS

    group = Slow()
    connection = Connection("NCCL", group, CpuAccelerator().launches)
    assert looking.wait(20)
    connection.shutdown()
    assert group.shut_down == 1
    time.sleep(0.2)
    assert not any(freed_under_look), "a handle that is freed under a look is a segmentation fault"


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 2)])
def test_messages_between_families_are_tried_before_they_are_direct(monkeypatch, sizes):
    """Each family works by itself, and not with the other: one of them is not given to MPI."""
    places = [Place("n1", name, "cuda") for name, size in zip("ab", sizes, strict=True) for _ in range(size)]
    tried = []

    def exchange(members, accelerator):
        tried.append(members)
        inside = len({places[member].family for member in members}) == 1
        return Ability(inside, "arrived as they were" if inside else "8388608 bytes arrived changed")

    monkeypatch.setattr(bind, "GroupMessages", lambda members: members)
    monkeypatch.setattr(bind, "exchange_in_ring", exchange)
    world = SimpleNamespace(
        topology=Topology(tuple(places)),
        rank=0,
        space=SimpleNamespace(members=list),
        all_objects=lambda value: [value or Ability(True, "of others")],
    )
    yes = Ability(True, "a probe sent it")
    families = {name: FamilyAbilities(name, "cuda", Ability(False, "-"), yes) for name in "ab"}
    result = bind.confirm_direct(world, FakeAccelerator(), families)
    assert [0, sizes[0]] in tried, "the first ranks of both"
    refused = "a" if sizes[0] == 1 else "b"
    assert not result[refused].direct.works and "messages between a and b" in result[refused].direct.reason
    assert result["ab".replace(refused, "")].direct.works
    assert message_route(result["a"], result["b"])[0] == "staged"


def test_threads_that_look_at_the_library_and_abort_it_have_the_ranks_device(monkeypatch):
    monkeypatch.setattr("hpctrain.comm.accelerators.launches.LOOK_SECONDS", 0.001)
    made, module = device(index=1)
    seen: list[tuple[str, int]] = []

    class Seeing(Noticing):
        def get_error(self):
            if threading.current_thread() is not threading.main_thread():  # which asks once whether it can be asked
                seen.append(("look", module.current_device()))
            return super().get_error()

        def abort(self):
            seen.append(("abort", module.current_device()))

    connection = Connection("NCCL", Seeing(), made.launches)
    deadline = time.monotonic() + 20
    while not seen and time.monotonic() < deadline:
        time.sleep(0.001)
    connection.abort()
    assert set(seen) == {("look", 1), ("abort", 1)}


class Passing(FakeStream):
    """A stream of a device that does what is queued when somebody looks."""

    def wait_event(self, event) -> None:
        self.add(event.force)


class Looking(FakeAccelerator):
    """Streams that wait for events on the device, and not when they are told to."""

    def new_stream(self) -> FakeStream:
        self._made.append(Passing())
        return self._made[-1]

    def wait_for(self, event) -> None:
        self._stream.add(event.force)


def operation_of(device: FakeAccelerator, done: list[str], name: str, records: Any = None) -> Operation:
    """An operation of which `done` has the name once the device has done it."""
    queued, stream = device.queued(), device.launches.stream

    def steps():
        stream.wait_event(queued)
        with device.on(stream):
            device._stream.add(lambda: done.append(name))
        return stream.record_event()
        yield

    return Operation(Instruments(records), name, 0, steps(), SOON, True, device, [torch.zeros(1)])


def test_a_launch_is_done_after_what_was_queued_and_before_what_is_queued_behind_it():
    device, done, ended = Looking(), [], []
    records = SimpleNamespace(
        add_group=lambda *_: 0, start=lambda group, name, num_bytes: name, finish=lambda name: ended.append(name)
    )
    for name in ("first", "second"):
        device._stream.add(lambda name=name: done.append(f"computed for {name}"))
        operation = operation_of(device, done, name, records)
        device.launches.begin(operation)
    operation.wait()
    device._stream.add(lambda: done.append("computed with both"))
    assert done == ["computed for first"], "the host waits for nothing: this is what a fake device does at one look"
    device.finish_queued()
    launches = ["computed for first", "first", "second", "computed with both"]
    assert sorted(launches, key=done.index) == launches and len(done) == 5
    assert done.index("computed for second") < done.index("second")
    assert not ended
    device.launches.look()
    assert ended == ["first", "second"] and operation.ended_at >= operation.begun_at > 0


def test_a_host_is_no_further_ahead_than_its_flight_record_has_room(monkeypatch):
    monkeypatch.setattr("hpctrain.comm.accelerators.launches.MOST_IN_FLIGHT", 3)
    device, done = Looking(), []
    for number in range(5):
        device.launches.begin(operation_of(device, done, str(number)))
    assert done == ["0", "1"]


def test_an_error_that_a_communicator_notices_ends_the_next_launch():
    device, error = Looking(), CommError("NCCL reports: a rank is gone")

    class Lost:
        def look(self):
            pass

        def check(self):
            raise error

    lost = Lost()
    device.launches.watch(lost)
    with pytest.raises(CommError, match="a rank is gone"):
        device.launches.begin(operation_of(device, [], "never"))
    device.launches.forget(lost)
    device.launches.begin(operation_of(device, [], "now"))


def test_no_launch_comes_between_the_parts_of_a_composite_operation():
    device, done = Looking(), []

    moving = SimpleNamespace(is_launched=False, finish=lambda: done.append("the last part"))
    device.launches.begin(moving, SimpleNamespace(begin=lambda operation: None))
    for name in ("one", "two"):
        device.launches.begin(operation_of(device, done, name))
        done.append(f"{name} was launched")
    assert done == ["the last part", "one was launched", "two was launched"]


def test_an_operation_that_waits_for_messages_is_no_launch():
    device = Looking()

    def steps():
        yield Condition(lambda: True, "a message")

    operation = Operation(Instruments(), "test", 0, steps(), SOON, device=device)
    with pytest.raises(AssertionError, match="that waits is no launch: a message in test"):
        device.launches.begin(operation)


def test_the_gradient_of_the_loss_is_filled_on_the_device_and_not_copied_there():
    """A copy from the host would wait for the end of the last step."""
    operations = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            operations.append(str(func))
            return func(*args, **(kwargs or {}))

    with Noting():
        result = gradient_of_loss(None, 8, torch.device("cpu"))
    assert operations == ["aten.full.default"] and result.item() == 0.125 and result.dtype == torch.float64
