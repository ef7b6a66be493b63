"""A maker's library by torch's process groups: whether it is there, and that a host waits for no device with streams.

Its sums are in `tests/ranks/test_torch_groups.py`.
"""

import sys
from types import SimpleNamespace

import torch
from torch.distributed import distributed_c10d

from hpctrain.comm.accelerators.kinds import CUDA, KINDS
from hpctrain.comm.accelerators.torch_device import SHARED_STREAMS
from hpctrain.comm.bind import native_ability
from hpctrain.comm.collectives.flat import SilentCollectives
from hpctrain.comm.collectives.native import NativeCollectives, library_ability
from hpctrain.comm.collectives.streamed import StreamedCollectives
from hpctrain.comm.progress.instruments import Instruments
from hpctrain.comm.progress.operation import Operation
from tests.ranks.fake_devices import FakeAccelerator
from tests.unit.comm.test_torch_device import SOON, Looking, device


def test_a_library_that_torch_does_not_have_is_not_used_and_the_reason_says_so(monkeypatch):
    reason = library_ability(KINDS["xpu"]).reason
    assert reason.endswith("has no torch.distributed.ProcessGroupXCCL (AttributeError)")
    monkeypatch.setitem(sys.modules, "torch_npu._C._distributed_c10d", SimpleNamespace(ProcessGroupHCCL=object))
    made = native_ability(device(KINDS["npu"]._replace(torch_type="privateuseone"))[0], 1)
    assert made == (True, f"HCCL of torch {torch.__version__}")
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", object, raising=False)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    assert library_ability(CUDA) == (True, "NCCL 2.28.9")


def test_without_cupy_no_route_has_the_stream_of_the_library():
    made, _ = device(KINDS["xpu"])
    made._given_cupy = None
    streams = [made.new_stream() for _ in range(100)]
    assert all(stream is not made.launches.stream for stream in streams)
    assert len({id(stream) for stream in streams}) == SHARED_STREAMS


class GroupOnDevice:
    """A process group that does its operations on a stream of its own, whose `wait` lets the caller's stream wait."""

    def __init__(self, accelerator: FakeAccelerator, done: list[str], name: str):
        self.accelerator, self.done, self.name = accelerator, done, name
        self.stream = accelerator.new_stream()

    def allreduce(self, tensors, options):
        assert not options.asyncOp and options.reduceOp == distributed_c10d.ReduceOp.SUM
        self.stream.wait_event(self.accelerator.queued())
        event = self.stream.add(lambda: self.done.append(self.name))
        return SimpleNamespace(wait=lambda: self.accelerator._stream.wait_event(event))


def test_operations_of_process_groups_are_queued_in_one_order_and_the_host_waits_for_none():
    accelerator, done = Looking(), []
    accelerator._stream.add(lambda: done.append("computed"))
    for name in ("first", "second"):
        native = object.__new__(NativeCollectives)
        native._group = GroupOnDevice(accelerator, done, name)
        native.sums, native.name, native.rank, native.size = [torch.float32], "NCCL", 0, 2
        native._accelerator, native._host = accelerator, SilentCollectives(0, 2)
        assert not list(native.steps("barrier", torch.empty(0))), "what is not for the library is the host's"
        values = torch.zeros(3)
        collectives = StreamedCollectives(native, accelerator, None, [native])
        operation = Operation(
            Instruments(), "test", 0, collectives.steps("all_reduce", values, "sum"), SOON, True, accelerator
        )
        accelerator.launches.begin(operation)
    assert done in ([], ["computed"]), "a fake device does one thing at a look"
    operation.wait()
    accelerator.finish_queued()
    assert done == ["computed", "first", "second"]
