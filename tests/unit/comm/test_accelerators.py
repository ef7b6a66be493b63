"""Devices: which rank takes which, what families are called, routes between them, and the probe of MPI."""

import os
import subprocess
import sys
import time

import pytest
import torch

from hpctrain.comm import bind
from hpctrain.comm.accelerators import kinds
from hpctrain.comm.accelerators.base import BufferPool
from hpctrain.comm.accelerators.cpu import CpuAccelerator
from hpctrain.comm.accelerators.kinds import KINDS, Ability, detect_device, family_of, local_rank
from hpctrain.comm.bind import DTYPES, choose_devices
from hpctrain.comm.collectives.native import library_ability
from hpctrain.comm.topology import Place, Topology, split_families
from hpctrain.comm.transports.abilities import (
    UNPLANNED,
    DescribedRoute,
    FamilyAbilities,
    bridged,
    combine,
    describe_routes,
    message_route,
)
from hpctrain.comm.transports.cuda_aware import judge, probe_direct, without_launcher
from hpctrain.comm.transports.messages import LARGEST_CHUNK_BYTES, SMALLEST_CHUNK_BYTES, chunk_bytes
from hpctrain.config.errors import TopologyError
from hpctrain.launch.mpi import LOCAL_RANK_VARIABLES

YES, NO = Ability(True, "it does"), Ability(False, "it does not")

NAMES = {
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100-SXM4-80GB MIG 3g.40gb": "a100-mig-3g.40gb",
    "NVIDIA H200": "h200",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA GH200 480GB": "gh200",
    "NVIDIA B200": "b200",
    "Tesla V100-SXM2-16GB": "v100",
    "Tesla T4": "t4",
    "NVIDIA L40S": "l40s",
    "NVIDIA A10G": "a10g",
    "NVIDIA RTX A6000": "rtxa6000",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "NVIDIA GeForce RTX 3080 Ti": "rtx3080ti",
    "AMD Instinct MI250X": "mi250x",
    "AMD Instinct MI300A": "mi300a",
    "AMD Radeon RX 7900 XTX": "rx7900xtx",
    "Quadro Something 5": "something-5",
    "NVIDIA": "gpu",
}


@pytest.mark.parametrize("name", NAMES)
def test_families_are_detected_by_the_names_of_devices(name):
    assert family_of(name) == NAMES[name]


def test_the_device_is_what_the_environment_says():
    assert detect_device({"HPCTRAIN_DEVICE": "cpu"})[:2] == ("cpu", "cpu")
    assert detect_device({"HPCTRAIN_DEVICE": "cpu", "HPCTRAIN_FAMILY": "epyc"})[:2] == ("cpu", "epyc")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_detected_later_by_all_ranks():
    assert detect_device({})[:2] == ("cpu", "cpu")
    assert detect_device({"HPCTRAIN_DEVICE": "cuda"})[:2] == ("cuda", "cuda")


def test_a_start_without_drivers_does_not_load_torch():
    code = (
        "import sys; from hpctrain.comm.accelerators import kinds; kinds.os.path.exists = lambda path: False;"
        "kinds.detect_device({});"
    )
    done = subprocess.run([sys.executable, "-c", code + "sys.exit('torch' in sys.modules)"], timeout=60)
    assert done.returncode == 0


def places(*kinds, host="n1"):
    return Topology(tuple(Place(host, kind, kind) for kind in kinds))


def taken(topology, visible, sharing=False):
    return [index for index, _ in choose_devices(topology, visible, sharing).values()]


def test_ranks_take_devices_in_their_order_and_those_on_the_host_none():
    visible = [("u0", "u1", "u2"), (), ("u0", "u1", "u2"), ("u0", "u1", "u2")]
    every = choose_devices(places("cuda", "cpu", "cuda", "cuda"), visible)
    assert every == {0: (0, "u0"), 2: (1, "u1"), 3: (2, "u2")}


def test_ranks_that_each_see_their_own_device_take_it():
    assert taken(places("cuda", "cuda"), [("u0",), ("u1",)]) == [0, 0]
    assert taken(places("cuda", "cuda"), [("u3", "u4"), ("u3", "u5")]) == [0, 1]


def test_no_device_is_taken_twice_where_mpi_makes_a_host_of_each_rank():
    """MPIR_CVAR_NOLOCAL=1 does. Whose devices have no name of their own are told apart by the machine."""
    alone = Topology(tuple(Place(host, "a", "cuda") for host in ("n1", "n1:1", "n1:2")))
    assert taken(alone, [("u0", "u1", "u2")] * 3) == [0, 1, 2]
    with pytest.raises(TopologyError, match=r"host n1 has 3 ranks for 2 visible devices: all 2 that rank 2 sees"):
        choose_devices(alone, [("u0", "u1")] * 3)
    with pytest.raises(TopologyError, match="host n1 has 2 ranks for 1 visible devices"):
        choose_devices(alone, [("u0",), ("u1",), ("u1",)])
    assert taken(alone, [("u0", "u1")] * 3, sharing=True) == [0, 1, 0]
    assert [alone.ranks_on_host(rank) for rank in range(3)] == [3, 3, 3]


def test_more_ranks_than_devices_are_refused_with_the_numbers_and_what_to_do():
    visible = [("u0", "u1")] * 3
    with pytest.raises(TopologyError, match=r"host n1 has 3 ranks for 2 visible devices.*--ntasks-per-node=2"):
        choose_devices(places("cuda", "cuda", "cuda"), visible)
    assert taken(places("cuda", "cuda", "cuda"), visible, sharing=True) == [0, 1, 0]


@pytest.mark.parametrize("variable", LOCAL_RANK_VARIABLES)
def test_every_launchers_number_of_a_rank_on_its_host_is_read(variable):
    assert local_rank({variable: "3"}) == 3
    assert local_rank({variable: "3", "SLURM_LOCALID": "0"}) == (0 if variable == "SLURM_LOCALID" else 3)


def test_devices_of_one_name_and_two_sizes_of_memory_are_two_families():
    gib = 1 << 30
    sizes = [39.4, 79.2, 79.4, 39.5, 0, 15.8]
    given = [Place("n1", name, "cuda") for name in ("a100", "a100", "a100", "a100", "a100", "v100")]
    result = split_families(given, [int(size * gib) for size in sizes])
    assert [place.family for place in result] == ["a100-40", "a100-80", "a100-80", "a100-40", "a100", "v100"]
    assert split_families(given[:2], [79 * gib, 80 * gib]) == given[:2], "a driver takes some of it"


@pytest.fixture
def driver(monkeypatch):
    """A host with NVIDIA's driver, whose device torch does not see."""
    monkeypatch.setattr(kinds.os.path, "exists", lambda path: path == "/dev/nvidiactl")
    monkeypatch.setattr(kinds, "torch_module", lambda kind: None)


@pytest.mark.parametrize("variables", [{}, {"HPCTRAIN_FAMILY": "h100"}, {"HPCTRAIN_DEVICE": "auto"}])
def test_a_host_whose_device_torch_does_not_see_is_refused(driver, monkeypatch, variables):
    for name, value in {"CUDA_VISIBLE_DEVICES": "", **variables}.items():
        monkeypatch.setenv(name, value)
    assert detect_device().kind == "cpu"
    with pytest.raises(TopologyError) as refused:
        bind._no_devices()
    assert "has /dev/nvidiactl of NVIDIA's driver, but torch" in str(refused.value)
    assert "sees no such device with CUDA_VISIBLE_DEVICES=''; install torch" in str(refused.value)
    assert str(refused.value).endswith("or set HPCTRAIN_DEVICE=cpu to compute on processors")
    monkeypatch.setenv("HPCTRAIN_DEVICE", "cpu")
    assert bind._no_devices() == []


def test_what_every_host_with_a_display_has_is_no_device(monkeypatch):
    monkeypatch.setattr(kinds.os.path, "exists", lambda path: path in ("/dev/dri", "/dev/dxg"))
    assert bind._no_devices() == []


def test_a_cpu_says_what_it_has():
    device = CpuAccelerator()
    memory = device.memory()
    assert memory.total >= memory.peak >= memory.used > 10_000_000
    assert device.model and device.kind == device.family == "cpu"
    assert device.products_per_second(DTYPES["fp32"]) > 1e8
    assert device.queued().query() and not device.is_on_device(torch.zeros(1))
    target = torch.zeros(3)
    assert device.copy(target, torch.ones(3)).query() and target.tolist() == [1, 1, 1]


def test_chunks_grow_with_the_root_of_the_message_between_bounds():
    assert chunk_bytes(0) == chunk_bytes(100_000) == SMALLEST_CHUNK_BYTES
    assert chunk_bytes(1 << 20) == 512 * 1024
    assert chunk_bytes(8 << 20) == 2 << 20
    assert chunk_bytes(1 << 30) == LARGEST_CHUNK_BYTES


def test_buffers_are_used_again_by_size():
    pool = BufferPool(lambda size: torch.empty(size, dtype=torch.uint8))
    first, second = pool.take(100), pool.take(128)
    assert first.numel() == second.numel() == 128 and first.data_ptr() != second.data_ptr()
    pool.release(first)
    assert pool.take(65).data_ptr() == first.data_ptr()
    assert pool.take(0).numel() == 1
    assert pool.num_bytes == 257


def family(name, kind="cuda", native=YES, direct=YES):
    return FamilyAbilities(name, kind, native, direct)


def test_routes_between_families_and_their_reasons():
    topology = Topology(tuple(Place(f"n{i}", name) for i, name in enumerate("aabbcd")))
    known = {
        "a": family("a"),
        "b": family("b", native=NO, direct=NO),
        "c": family("c"),
        "d": family("d", "cpu", NO, NO),
    }
    result = {(r.family, r.other): r for r in describe_routes(topology, known)}
    routes = {pair: r.route for pair, r in result.items()}
    assert routes[("a", "a")] == "native"
    assert routes[("b", "b")] == routes[("a", "b")] == routes[("b", "c")] == "staged"
    assert routes[("a", "c")] == "direct"
    assert routes[("a", "d")] == routes[("b", "d")] == "staged"
    assert routes[("c", "c")] == routes[("d", "d")] == "alone"
    assert len(routes) == 10
    assert result[("a", "b")].reason == "MPI is not given memory of b: it does not"
    assert result[("b", "b")].reason.endswith("no native library: it does not")
    assert "else staged" in result[("a", "c")].reason, "no plan is known"
    hosts = Topology((Place("n0", "cpu"), Place("n0", "cpu")))
    assert [r[:3] for r in describe_routes(hosts, {})] == [("cpu", "cpu", "host")]
    assert isinstance(result[("a", "a")], DescribedRoute)


def test_a_family_can_do_what_all_of_its_ranks_and_hosts_can():
    places = (("n0", "a", "cuda"), ("n0", "a", "cuda"), ("n1", "a", "cuda"), ("n1", "b", "rocm"), ("n2", "c"))
    topology = Topology(tuple(Place(*place) for place in places))
    lame = Ability(False, "n1 cannot")
    result = combine(topology, [(YES, YES), (YES, None), (YES, lame), (NO, None), (NO, None)])
    assert result["a"] == FamilyAbilities("a", "cuda", YES, lame)
    assert result["b"] == FamilyAbilities("b", "rocm", NO, lame)
    assert result["c"].kind == "cpu"


def test_the_probe_sends_to_itself_in_a_job_of_its_own(monkeypatch):
    monkeypatch.setenv("PMI_RANK", "3")
    monkeypatch.setenv("PMI_SIZE", "8")
    monkeypatch.setenv("PMI_FD", "77")
    result = probe_direct("cpu")
    assert result == (True, "a probe sent it in messages of 1024 and 8388608 bytes, which arrived as they were")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_probe_says_why_it_could_not():
    result = probe_direct("cuda")
    assert not result.works and "exit code 1" in result.reason
    assert "CUDA" in result.reason or "no NVIDIA driver" in result.reason, "as torch is built for CPUs, or for CUDA"


def test_a_probe_that_dies_is_a_no():
    result = probe_direct("cpu", command=[sys.executable, "-c", "import ctypes; ctypes.string_at(0)"])
    assert result == (False, "a probe that sent it died of SIGSEGV: this MPI takes host memory only")
    assert judge(139, "", "").reason == result.reason, "a launcher or a library's handler reports it so"
    assert judge(3, "", "one\nthe last\n").reason.endswith("(exit code 3): the last")
    assert judge(0, "", "").reason.endswith("it said nothing")


def test_a_probe_that_dies_leaves_no_core_file(monkeypatch, tmp_path):
    """Its MPI is replaced by one that says what the limit is."""
    (tmp_path / "mpi4py.py").write_text("import resource, sys; sys.exit(str(resource.getrlimit(resource.RLIMIT_CORE)))")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert probe_direct("cpu").reason.endswith("(exit code 1): (0, 0)")


def test_a_probe_that_hangs_is_ended_with_all_that_it_started(tmp_path):
    note = tmp_path / "pid"
    script = f"sleep 60 & echo $! > {note}; wait"
    start = time.monotonic()
    result = probe_direct("cpu", timeout_seconds=0.5, command=["/bin/sh", "-c", script])
    assert result == (False, "a probe that sent it was not done after 0.5 s")
    assert time.monotonic() - start < 50, "less than what was started sleeps"
    time.sleep(1)
    stat = f"/proc/{int(note.read_text())}/stat"
    assert not os.path.exists(stat) or open(stat).read().rsplit(")", 1)[1].split()[0] == "Z"


def test_the_launcher_is_left_out_of_the_probes_environment():
    given = {"PMIX_RANK": "1", "SLURM_PROCID": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_pml": "ucx", "PATH": "/bin"}
    assert without_launcher(given) == {"OMPI_MCA_pml": "ucx", "PATH": "/bin"}


def test_the_native_library_or_why_not(monkeypatch):
    monkeypatch.setenv("HPCTRAIN_NATIVE", "0")
    for kind in KINDS.values():
        assert library_ability(kind) == (False, "HPCTRAIN_NATIVE=0")
    monkeypatch.delenv("HPCTRAIN_NATIVE")
    monkeypatch.delattr("torch.distributed.ProcessGroupNCCL", raising=False)
    missing = f"torch {torch.__version__} has no torch.distributed.ProcessGroupNCCL (AttributeError)"
    assert library_ability(KINDS["cuda"]) == (False, missing)
    assert "ProcessGroupHCCL (ModuleNotFoundError)" in library_ability(KINDS["npu"]).reason


def test_mpi_is_given_memory_of_devices_beside_a_library_between_families_alone_and_if_that_is_proven():
    with_library, without = [family(name) for name in "ac"], [family(name, native=NO) for name in "ac"]
    unproven, forced = Ability(False, "not proven"), Ability(True, "HPCTRAIN_DIRECT=1")

    def routes(families: list[FamilyAbilities], bridge: Ability) -> tuple[str, str]:
        one, other = families
        return message_route(one, one, bridge)[0], message_route(one, other, bridge)[0]

    assert routes(with_library, UNPLANNED) == routes(with_library, forced) == ("staged", "direct")
    assert routes(with_library, unproven) == ("staged", "staged")
    assert message_route(*with_library, unproven)[1] == "not proven"
    assert routes(without, unproven) == ("direct", "direct"), "nothing else uses the devices"
    one_library = [with_library[0], without[1]]
    assert message_route(*one_library, unproven)[0] == "staged"
    known = {of.name: of for of in one_library}
    assert bridged(["a", "c"], known) == {"a", "c"}
    assert not bridged(["a"], known) and not bridged(["a", "c"], {of.name: of for of in without})


def test_a_processor_forgets_its_peak_of_memory():
    """The legs of a run have peaks of their own."""
    accelerator = CpuAccelerator()
    filled = torch.ones(128 << 20, dtype=torch.uint8)
    del filled
    before = accelerator.memory()
    accelerator.forget_peak()
    after = accelerator.memory()
    assert before.peak >= before.used + (64 << 20), "the tensor was freed"
    assert after.peak < before.peak - (64 << 20)
