"""What a cluster file leaves out is filled in, what cannot be meant is refused, and all mistakes are listed."""

import pytest

from hpctrain.config.clusters.cluster_file import parse_cluster, parse_cluster_file, read_cluster_file
from hpctrain.config.clusters.device_catalogue import ACCELERATORS, NETWORKS, lookup, lookup_accelerator
from hpctrain.config.errors import TopologyError
from hpctrain.planner.prices.devices import DATASHEET_ERROR, UNMEASURED_ERROR, DeviceModel
from hpctrain.planner.prices.efficiency import EFFICIENCIES, efficiency_of
from tests.unit.described import FAMILY, NODE

SHORT = """
[families.mi300x]
model = "AMD Instinct MI300X"
[families.h100]
model = "H100"
[fabrics.ib]
network = "InfiniBand NDR"
[[nodes]]
count = 2
devices = {mi300x = 2, h100 = 2}
nics = [{fabric = "ib"}]
"""
BAD = """
extra = 1
[families.a]
model = "H1000"
[families.mi]
model = "MI300X"
origin = "datasheet"
memory_bytes = 192
memory_byte_per_second = 5e12
[families.cpu]
kind = "cpv"
origin = "assumed"
memory_bytes = -3
memory_bytes_per_second = "fast"
memory_bytes_per_second = 3e9
peak_flops_per_second = {bf16 = 989}
[fabrics.ib]
network = "NDRR"
[fabrics.eth]
origin = "assumed"
latency_seconds = 3
[[nodes]]
count = 0
devices = {mi = 4, h10 = 1}
nics = [{fabric = "ibb"}]
[[nodes]]
devices = {cpu = 2}
origin = "datasheet"
link_latency_seconds = 1e-6
link_bytes_per_second = 450
nics = [{fabric = "eth"}]
ranks = [0, 1]
"""
NAMED = [
    "line 15: memory_bytes_per_second: the key is there twice",
    "extra: unknown key",
    "families.a.model = 'H1000': not in the catalogue; did you mean 'H100'?",
    "families.mi.memory_bytes = 192: the catalogue has 2.061e11; a unit was forgotten, or applied twice; did you mean",
    "families.mi.memory_byte_per_second: unknown key; did you mean 'memory_bytes_per_second'?",
    "families.cpu.kind = 'cpv'",
    "families.cpu.memory_bytes = -3",
    "families.cpu.memory_bytes_per_second = 'fast'",
    "families.cpu.peak_flops_per_second.bf16: 989.0 FLOP/s? usual are 1e12 to 1e16; set it in FLOP/s",
    "fabrics.ib.network = 'NDRR': not in the catalogue; did you mean 'NDR'?",
    "fabrics.eth.latency_seconds: 3.0 seconds? usual are",
    "nodes.0.count = 0",
    "nodes.1.link_bytes_per_second: 450.0 bytes/s?",
]


def test_a_model_and_a_network_fill_in_the_rest(tmp_path):
    path = tmp_path / "short.toml"
    path.write_text(SHORT)
    cluster, _, sources = read_cluster_file(path)
    assert cluster.families["h100"].kind == "cuda"
    assert cluster.families["mi300x"].origin_of("memory_bytes") == "datasheet"
    assert cluster.nodes[0].link_bytes_per_second == 48e9  # the slower one's
    assert cluster.nodes[0].nics[0].send_bytes_per_second == 50e9
    assert cluster.fabrics["ib"].origin_of("latency_seconds") == "assumed"
    assert sources["families.h100.memory_bytes"] == "NVIDIA H100 data sheet, SXM5"
    assert "slower" in sources["nodes.0.link_bytes_per_second"]


def test_devices_that_the_catalogue_has_fully_connected_are_so_by_its_link_alone():
    alone = SHORT.replace("{mi300x = 2, h100 = 2}", "{mi300x = 8}")
    typed = alone.replace("[[nodes]]", "[[nodes]]\nlink_bytes_per_second = 3e11")
    read = [parse_cluster_file(text, "a file") for text in (SHORT, alone, typed)]
    assert [each.cluster.nodes[0].fully_connected for each in read] == [False, True, False]
    assert "one for each two devices" in read[1].sources["nodes.0.link_bytes_per_second"]


def test_a_typed_value_wins():
    typed = SHORT.replace('"H100"', '"H100"\norigin = "measured"\nmemory_bytes = 70e9')
    family = parse_cluster(typed, "a file").families["h100"]
    assert family.memory_bytes == 70e9
    assert (family.origin_of("memory_bytes"), family.origin_of("memory_bytes_per_second")) == ("measured", "datasheet")


def test_all_mistakes_are_listed():
    with pytest.raises(TopologyError) as caught:
        parse_cluster(BAD, "a file")
    lines = [line.removeprefix("a file: ") for line in str(caught.value).splitlines()]
    numbers = [int(line.removeprefix("line ").partition(":")[0]) for line in lines]
    assert numbers == sorted(numbers), "they are in the order of the file"
    assert not any("nodes.0.nics.0.send" in line for line in lines), "it follows from the fabric"
    assert not any("nothing said of the link" in line for line in lines), "it follows from the families"
    texts = [line.partition(": ")[2] for line in lines]
    named = [name.partition(": ")[2] if name.startswith("line ") else name for name in NAMED]
    assert [name for name in named if not any(text.startswith(name) for text in texts)] == []
    assert not any("no family" in text for text in texts), "tables are compared when each is right by itself"


def test_all_mistakes_between_tables_are_listed():
    text = SHORT.replace("mi300x = 2", "h10 = 2").replace('fabric = "ib"', 'fabric = "ibb"')
    text += "[[nodes]]\ndevices = {h100 = 1}\nranks = [0]\n"
    with pytest.raises(TopologyError) as caught:
        parse_cluster(text, "a file")
    for mistake in ("devices: no family 'h10'", "fabric: no fabric 'ibb'", "ranks: missing", "no fabric in common"):
        assert mistake in str(caught.value)


H100 = 'model = "H100"'
NAMED_BY_LINE = [
    (H100, 'modle = "H100"', "line 5: families.h100.modle: unknown key; did you mean 'model'?"),
    (H100, 'model = "A100"', "line 5: families.h100.model = 'A100': not in the catalogue; did you mean 'A100-40' or"),
    (H100, "", "line 4: families.h100: nothing says what it is; set model, `hpctrain catalogue` lists them"),
    (H100, f'{H100}\norigin = "assumed"\nmemory_bytes = "80 GB"', "line 7: families.h100.memory_bytes = '80 GB': must"),
    ('"InfiniBand NDR"', "NDR", "not valid TOML: Invalid value (at line 7, column 11): network = NDR"),
    ("[fabrics.ib]", "[families.h100]", "line 6: [families.h100]: the table is there twice; keep one"),
    ("[[nodes]]", "[nodes]", "in [ ]; write [[nodes]] above each"),
    ("{mi300x = 2, h100 = 2}", "[4]", "line 10: nodes.0.devices = [4]: must be a table, such as {name = 1}"),
]


@pytest.mark.parametrize(("old", "new", "says"), NAMED_BY_LINE)
def test_one_mistake_is_one_message_with_its_line(old, new, says):
    """What follows from a mistake, such as figures that no model fills in, is not listed with it."""
    assert old in SHORT
    with pytest.raises(TopologyError) as caught:
        parse_cluster(SHORT.replace(old, new), "a file")
    assert says in str(caught.value)
    lost_fabric = new == "[families.h100]"
    assert len(str(caught.value).splitlines()) == 1 + lost_fabric


def test_figures_of_links_have_a_range():
    link = (
        '[[links]]\norigin = "assumed"\nfamilies = ["h100", "mi300x"]\nlatency_seconds = 6\nbytes_per_second = 12.5\n'
    )
    with pytest.raises(TopologyError) as caught:
        parse_cluster(SHORT + link, "a file")
    assert "links.0.latency_seconds: 6.0 seconds? usual are" in str(caught.value)
    assert "links.0.bytes_per_second: 12.5 bytes/s?" in str(caught.value)


def test_what_nothing_is_reached_by_has_a_warning():
    more = """[fabrics.spare]
network = "HDR"
[families.a]
model = "A100-40"
[[links]]
origin = "assumed"
families = ["h100", "h100"]
fabric = "spare"
latency_seconds = 6e-6
bytes_per_second = 12.5e9
"""
    cluster = parse_cluster(SHORT + more, "a file")
    assert cluster.without_effect == [
        "families.a: no node has it",
        "fabrics.spare: no node has a NIC on it",
        "links.0: h100 are not both on spare, so that it counts for nothing",
    ]
    assert "spare" not in cluster.describe()
    assert parse_cluster(SHORT, "a file").without_effect == []


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("v100 32GB", "V100-32"),
        ("H100 PCIe", "H100-PCIe"),
        ("A100 PCIe 40GB", None),
        ("NVIDIA h-100", "H100"),
        ("AMD mi-300x", "MI300X"),
        ("AMD Instinct MI 300X", "MI300X"),
        ("AMD Instinct MI250X", "MI250X-GCD"),
        ("NVIDIA A40", "A40"),
        ("NVIDIA A10G", None),
        ("L40", None),
        ("Tesla P100-PCIE-16GB", None),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("Gaudi2", "Gaudi-2"),
        ("GeForce RTX 3090", "RTX-3090"),
    ],
)
def test_names_match_loosely(model, name):
    assert lookup_accelerator(model) == name


def test_an_accelerator_may_be_like_another():
    """What is not typed is that of the other, as assumed; so is how near it comes to its figures."""
    text = SHORT.replace('model = "H100"', 'model = "My chip"\nlike = "H100"\nmemory_bytes = 60e9')
    family = parse_cluster(text, "a file").families["h100"]
    assert (family.model, family.memory_bytes) == ("My chip", 60_000_000_000)
    assert family.peak_flops_per_second["bf16"] == 989e12
    assert (family.origin_of("memory_bytes"), family.origin_of("peak_flops_per_second")) == ("datasheet", "assumed")
    device, hopper = DeviceModel("h100", family), efficiency_of("cuda", "H100")
    assert device.efficiency.product_share == hopper.product_share and device.error == UNMEASURED_ERROR
    assert efficiency_of("cuda", "NVIDIA A100-SXM4-40GB") == efficiency_of("cuda", "A100-80"), "it is no A10"
    with pytest.raises(TopologyError, match="families.h100.like = 'H101': not in the catalogue; did you mean 'H100'"):
        parse_cluster(text.replace('like = "H100"', 'like = "H101"'), "a file")


@pytest.mark.parametrize("name", sorted(ACCELERATORS))
def test_a_speed_that_nobody_measured_says_what_it_is_worth(name):
    entry = ACCELERATORS[name]
    device = DeviceModel("a", entry.family(name))
    measured = EFFICIENCIES[entry.family_name].is_measured
    assert device.error == (DATASHEET_ERROR if measured else UNMEASURED_ERROR)
    said = [line for line in device.assumptions(()) if "nobody measured" in line]
    assert len(said) == (not measured)
    assert entry.family_name != "cdna2" or "73.5 TFLOP/s" in said[0]
    assert entry.source and device.family.peak_flops_per_second["fp16"] > 0


def test_memory_twice_scaled_is_refused_but_not_with_a_truth():
    typed = SHORT.replace('"H100"', '"H100"\norigin = "datasheet"\nmemory_bytes = 20e6')
    with pytest.raises(TopologyError, match="families.h100.memory_bytes = 2e7: the catalogue has"):
        parse_cluster(typed, "a file")
    assert (
        "h100"
        in parse_cluster(
            typed.replace(
                "[[nodes]]",
                '[[nodes]]\nlink_latency_seconds = 1e-6\nlink_bytes_per_second = 1e8\norigin = "assumed"',
            )
            + "[truth]\n",
            "a file",
        ).families
    )


def test_a_reserve_is_kept_free():
    family = parse_cluster(SHORT, "a file").families["h100"]
    assert family.usable_bytes == family.memory_bytes - 1_500_000_000 - int(0.04 * family.memory_bytes)
    typed = parse_cluster(FAMILY.replace("kind", "reserved_bytes = 3e9\nkind") + NODE, "a file").families["mi250x"]
    assert typed.usable_bytes == 61e9
    small = parse_cluster(FAMILY.replace("64_000_000_000", "300_000_000") + NODE, "a file").families["mi250x"]
    assert small.usable_bytes == 300_000_000


@pytest.mark.parametrize(
    ("called", "name"), [("Slingshot", "Slingshot-11"), ("NDR", "NDR"), ("InfiniBand NDR200", "NDR200")]
)
def test_networks_match_loosely(called, name):
    assert lookup(called, NETWORKS) == name
