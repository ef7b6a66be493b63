"""Start a module where a pretended device stands in for CUDA's; at the end say what it complained of.

    HPCTRAIN_DEVICE=cuda python -m tests.pretended_start hpctrain train tiny

All of hpctrain is as it is, from the detection of devices on. Replaced are torch's module of the device, CuPy, and the
library of collectives. See `tests/ranks/pretended_device.py`. PRETENDED_FAULT says what is wrong with the host.
"""

import atexit
import os
import runpy
import sys

from mpi4py import MPI

from hpctrain.comm import bind
from hpctrain.comm.accelerators import kinds, torch_device
from hpctrain.comm.accelerators.kinds import Ability
from hpctrain.comm.collectives import native
from hpctrain.comm.collectives.streamed import StreamedCollectives
from hpctrain.comm.groups.maker import RouteMaker
from hpctrain.comm.probe import device_timing
from hpctrain.comm.transports.abilities import UNPLANNED
from hpctrain.engine import routes
from tests.pretended_faults import FAULT_VARIABLE, MOVED, REFUSED, TWO_SIZES, UNSEEN
from tests.ranks.pretended_device import KIND, MODULE, PretendedDevice, pin_by_copying
from tests.ranks.watched_library import WatchedGroup, WatchedLibrary
from tests.started import COMPLAINED
from tests.unit.fake_torch import GIB

DRIVER_FILE = "/dev/null"


class RefusingLibrary(WatchedLibrary):
    """A library whose network is not there."""

    def __call__(self, store, rank: int, size: int, options) -> WatchedGroup:
        raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR: unhandled system error")


def replace_cuda() -> None:
    """Have every part of hpctrain that asks for CUDA find the pretended device. The host's products take their time:
    only small ones are measured."""
    fault, kind = os.environ.get(FAULT_VARIABLE), KIND
    library = RefusingLibrary(MPI) if fault == REFUSED else WatchedLibrary(MPI)
    backend = RouteMaker.backend

    def moving(maker, *args, **kwargs):
        """Return what a group communicates by, whose messages move while the library waits, as they do on a device."""
        made = backend(maker, *args, **kwargs)
        if made and isinstance(made.collectives, StreamedCollectives):
            library.moves(made.collectives.stream, made.transport.poll)
        return made

    def module_of(kind):
        return MODULE if kind.name == KIND.name and fault != UNSEEN else None

    MODULE.count = 4
    if fault == UNSEEN:
        kind = KIND._replace(driver_files=(DRIVER_FILE,), device_files=(DRIVER_FILE,))
    if fault in (TWO_SIZES, MOVED):
        MODULE.name, MODULE.total = "NVIDIA A100", int((39.4, 79.2)[(kinds.local_rank(os.environ) or 0) % 2] * GIB)
    if fault == MOVED:
        bind.probe_direct = lambda *_: Ability(True, "pretended")
    kinds.KINDS[KIND.name] = kind
    PretendedDevice.mixes, choose_bridge = None, routes.choose_bridge

    def chosen(world, job, plan):
        """Choose how messages go by a plan: from now on the device knows what is proven."""
        reasons = choose_bridge(world, job, plan)
        devices = world.settings.devices
        PretendedDevice.mixes = devices is not None and devices.bridge != UNPLANNED and devices.bridge.works
        return reasons

    routes.choose_bridge = chosen
    for user in (kinds, torch_device):
        user.torch_module = module_of
    torch_device.TorchAccelerator = PretendedDevice
    torch_device.MEASURED_SIZE = device_timing.PRODUCT_SIZE = 64
    device_timing.SHAPES = device_timing.SHAPES[:4]
    native.group_class = lambda kind: library
    RouteMaker.backend = moving
    pin_by_copying()


def main() -> None:
    replace_cuda()
    atexit.register(lambda: [print(COMPLAINED, each, file=sys.stderr) for each in MODULE.complaints])
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
