"""Cluster files: what is whole round-trips; what is not is refused with file and key."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.config.bounds import LEAST_SECONDS, MOST_SECONDS
from hpctrain.config.clusters.cluster import (
    Cluster,
    Fabric,
    Family,
    LinkClass,
    MessageTiming,
    Nic,
    Nodes,
    ProductSpeed,
    Profile,
    RowTimes,
)
from hpctrain.config.clusters.cluster_file import (
    dump_cluster,
    load_cluster,
    merge_profiles,
    parse_cluster,
    read_cluster_file,
    ready_clusters,
)
from hpctrain.config.clusters.truth import Truth
from hpctrain.config.errors import TopologyError
from tests.unit.described import FAMILY, NODE, TEXT


@pytest.fixture
def write(tmp_path):
    def write(text: str):
        path = tmp_path / "cluster.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def cluster(write) -> Cluster:
    return load_cluster(write(TEXT))


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=9)  # no file has zero bytes
names = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=8) | st.sampled_from(
    ["a b", "x.y", '"']
)
speeds = st.floats(1e6, 1e15)  # what is no accelerator is refused
seconds = st.just(0.0) | st.floats(1e-12, 1.0)
durations = st.floats(LEAST_SECONDS, MOST_SECONDS)
sizes = st.integers(1 << 17, 1 << 46)
origins = st.sampled_from(["measured", "datasheet", "assumed"])
dtypes = st.sampled_from(["fp32", "bf16", "fp16"])


@st.composite
def some_families(draw) -> Family:
    products = draw(st.dictionaries(st.tuples(dtypes, st.tuples(*[st.integers(1, 9)] * 3)), speeds, max_size=3))
    host_copy = draw(st.none() | speeds)
    return Family(
        origin=draw(origins),
        origins={} if host_copy is None else draw(st.dictionaries(st.just("host_copy_bytes_per_second"), origins)),
        kind=draw(st.sampled_from(["cpu", "cuda", "rocm"])),
        model=draw(st.none() | texts),
        memory_bytes=draw(sizes),
        memory_bytes_per_second=draw(speeds),
        host_copy_bytes_per_second=host_copy,
        peak_flops_per_second=draw(st.dictionaries(dtypes, speeds, min_size=1)),
        sustained_flops_per_second=draw(st.dictionaries(dtypes, speeds)),
        products=[ProductSpeed(dtype=d, shape=s, flops_per_second=speed) for (d, s), speed in products.items()],
        measured_at_once=draw(st.none() | st.integers(1, 9)),
    )


@st.composite
def profiles_of(draw, families) -> list[Profile]:
    keys = st.tuples(st.sampled_from(sorted(families)), st.sampled_from(["a job", "llama: 8 layers; fp32"]))
    keys = st.tuples(keys, st.integers(1, 3))
    passes = st.tuples(durations, durations)
    result = []
    for (family, work), zero in draw(st.lists(keys, unique=True, max_size=3)):
        rows = sorted(draw(st.sets(st.integers(1, 99), min_size=1, max_size=3)))
        times = [
            RowTimes(rows=n, embedding_seconds=draw(passes), block_seconds=draw(passes), head_seconds=draw(passes))
            for n in rows
        ]
        result.append(
            Profile(
                origin="measured",
                family=family,
                work=work,
                zero=zero,
                replicas=draw(st.integers(1, 8)),
                largest_rows=draw(st.integers(0, 99)),
                limited_by=draw(st.sampled_from([None, "job", "time", "memory"])),
                update_seconds=draw(st.none() | durations),
                times=times,
            )
        )
    return result


@st.composite
def clusters(draw) -> Cluster:
    families = draw(st.dictionaries(names, some_families(), min_size=1, max_size=3))
    fabrics = draw(
        st.dictionaries(
            names,
            st.builds(Fabric, origin=origins, latency_seconds=seconds, bytes_per_second=st.none() | speeds),
            min_size=1,
            max_size=3,
        )
    )
    first, *others = fabrics
    nics = st.builds(
        Nic,
        origin=origins,
        count=st.integers(1, 4),
        send_bytes_per_second=speeds,
        receive_bytes_per_second=speeds,
        fabric=st.just(first) if not others else st.sampled_from(others),
    )
    common = draw(nics).model_copy(update={"fabric": first})
    nodes = st.builds(
        Nodes,
        origin=origins,
        count=st.integers(1, 3),
        devices=st.dictionaries(st.sampled_from(sorted(families)), st.integers(1, 4), min_size=1),
        link_latency_seconds=seconds,
        link_bytes_per_second=speeds,
        nics=st.lists(nics, max_size=2).map(lambda more: (common, *more)),
    )
    keys = st.tuples(
        st.sampled_from([None, *fabrics]), st.lists(st.sampled_from(sorted(families)), min_size=2, max_size=2)
    )
    resolved = draw(st.lists(keys, unique_by=lambda key: (key[0], tuple(sorted(key[1]))), max_size=3))
    times = st.lists(
        st.builds(MessageTiming, message_bytes=sizes, flows=st.integers(1, 8), seconds=durations), max_size=3
    )
    links = [
        LinkClass(
            origin=draw(origins),
            families=pair,
            fabric=fabric,
            times=draw(times),
            latency_seconds=draw(seconds),
            bytes_per_second=draw(speeds),
        )
        for fabric, pair in resolved
    ]
    result = Cluster(
        families=families,
        fabrics=fabrics,
        nodes=draw(st.lists(nodes, min_size=1, max_size=3)),
        links=links,
        profiles=draw(profiles_of(families)),
    )
    if not draw(st.booleans()):
        return result
    ranks = iter(draw(st.permutations(range(result.num_devices))))
    placed = [
        table.model_copy(update={"ranks": tuple(next(ranks) for _ in range(table.count * table.num_devices))})
        for table in result.nodes
    ]
    return result.model_copy(update={"nodes": tuple(placed)})


@settings(deadline=None)
@given(cluster=clusters(), comment=st.text(max_size=300))
def test_files_round_trip(cluster, comment, tmp_path_factory):
    path = tmp_path_factory.mktemp("clusters") / "cluster.toml"
    name = next(iter(cluster.families))
    comments = {"": comment, f"families.{name}": comment, "nodes.0": comment, "links.0.times": comment}
    path.write_text(dump_cluster(cluster, comments), encoding="utf-8")
    assert load_cluster(path) == cluster


@settings(deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(ready_clusters())), at_end=st.booleans())
def test_profiles_are_replaced_and_nothing_else(data, name, at_end):
    """In the files as they are written, with comments and a truth, and with profiles between other tables."""
    text = ready_clusters()[name].read_text()
    bare = parse_cluster(text, name)
    first, second = (data.draw(profiles_of(bare.families)) for _ in range(2))
    with_first = merge_profiles(text, name, first, ["measured\ntoday"] if first else [])
    assert parse_cluster(with_first, name) == bare.model_copy(update={"profiles": tuple(first)})
    assert with_first.startswith(text.rstrip("\n")), "what was there is as it was"
    if not at_end:  # the profiles before the truth
        added = with_first[len(text.rstrip("\n")) :]
        with_first = text.replace("[truth]\n", f"{added}\n\n# Of pretend devices.\n[truth]\n", 1)
    with_second = merge_profiles(with_first, name, second, [])
    keys = {profile.key for profile in second}
    kept = [profile for profile in first if profile.key not in keys]
    assert parse_cluster(with_second, name).profiles == (*kept, *second)
    assert "today" not in with_second and ("# Of pretend devices." in with_second) != at_end
    written = iter(with_second.splitlines())
    assert all(line in written for line in text.splitlines() if line), "all else is there, in its order"


def test_profiles_that_cannot_be_distinguished_from_the_rest_are_left_alone(write):
    """A table that is written in line, as `profiles = [...]` at the top, is no [[profiles]] that can be cut out."""
    profile = "{origin = 'measured', family = 'mi250x', work = 'w', zero = 1, replicas = 1, largest_rows = 1, times = ["
    times = "{rows = 1, embedding_seconds = [1.0, 1.0], block_seconds = [1.0, 1.0], head_seconds = [1.0, 1.0]}]}"
    text = f"profiles = [{profile}{times}]\n{FAMILY}{NODE}"
    assert len(parse_cluster(text, "a file").profiles) == 1
    with pytest.raises(TopologyError, match="a file: its profiles cannot be distinguished from the rest"):
        merge_profiles(text, "a file", parse_cluster(text, "a file").profiles, [])


def test_text_that_toml_writes_otherwise_than_json_round_trips(write):
    named = load_cluster(write(FAMILY + NODE))
    family = named.families["mi250x"].model_copy(update={"model": 'a "b" \\ \x7f \n \U0001f600'})
    changed = named.model_copy(update={"families": {"mi250x": family}})
    assert load_cluster(write(dump_cluster(changed))) == changed


def test_the_truth_is_kept_apart(cluster, write):
    truth = Truth(time_scale=50.0, memory_scale=1e-4)
    path = write(dump_cluster(cluster, {"truth": "Of the pretend devices alone."}, truth))
    assert read_cluster_file(path).truth == truth
    assert load_cluster(path) == cluster
    assert not hasattr(load_cluster(path), "truth")


def test_comments_are_above_what_they_are_about(cluster):
    text = dump_cluster(cluster, {"families.a100.memory_bytes": "words " * 30, "": "head"})
    assert text.startswith("# head\n\n[families.a100]\n")
    above, _ = text.split("memory_bytes = 80_000_000_000", 1)
    assert above.splitlines()[-2].startswith("# words words")
    assert max(map(len, above.splitlines())) <= 110


PROFILE = """
[[profiles]]
family = "mi250x"
origin = "measured"
work = "some"
zero = 1
replicas = 1
largest_rows = 3
"""
ONE = "embedding_seconds = [1e-3, 1e-3], block_seconds = [1e-3, 1e-3], head_seconds = [1e-3, 1e-3]"
BAD_FILES = [
    ("families = ", "not valid TOML"),
    ("", "families: missing; set it"),
    (FAMILY, "nodes: missing; set it"),
    ("families = {}\n" + NODE, "families = {}: dictionary should have at least 1 item"),
    ("families = 3\n" + NODE, "families = 3: must be a table"),
    ("nodes = 3\n" + FAMILY, "nodes = 3: must be a list"),
    ("extra = 1\n" + FAMILY + NODE, "extra: unknown key; known are: fabrics, families, links, nodes, profiles, truth"),
    (
        FAMILY.replace("memory_bytes =", "memory_byte =") + NODE,
        "families.mi250x.memory_byte: unknown key; did you mean 'memory_bytes'?",
    ),
    (FAMILY + "memory = 1\n" + NODE, "families.mi250x.memory: unknown key; did you mean 'memory_bytes'?"),
    (FAMILY.replace("shape", "shap") + NODE, "families.mi250x.products.0.shap: unknown key; did you mean 'shape'?"),
    (FAMILY.replace("dtype =", "shap = 1, dtype =") + NODE, "products.0.shap: unknown key; did you mean 'shape'?"),
    (FAMILY.replace("[4096, 4096, 4096]", "[4096, 0, 4096]") + NODE, "products.0.shape.1 = 0: input should be greater"),
    (FAMILY.replace("64_000_000_000", "-1") + NODE, "families.mi250x.memory_bytes = -1: input should be greater"),
    (FAMILY.replace("64_000_000_000", "1.5") + NODE, "memory_bytes = 1.5: must be a whole number"),
    (FAMILY.replace("64_000_000_000", "true") + NODE, "memory_bytes = True: must be a whole number"),
    (FAMILY.replace("1.6e12", "inf") + NODE, "memory_bytes_per_second = inf: input should be a finite number"),
    (FAMILY.replace("1.6e12", "'fast'") + NODE, "memory_bytes_per_second = 'fast': must be a number"),
    (FAMILY.replace('"rocm"', '"rocn"') + NODE, "families.mi250x.kind = 'rocn': input should be 'cpu', 'cuda', 'rocm'"),
    (
        FAMILY.replace('"measured"', '"measure"') + NODE,
        "families.mi250x.origin = 'measure': input should be 'measured'",
    ),
    (
        FAMILY + "origins = {memory_byte = 'assumed'}\n" + NODE,
        "'memory_byte' is no figure of this table; did you mean 'me",
    ),
    (
        FAMILY.replace("{bf16 = 140e12}", "{}") + NODE,
        "families.mi250x: no speed: set peak_flops_per_second or sustained",
    ),
    (
        FAMILY.replace("{bf16 = 140e12}", "{bf = 1e12}") + NODE,
        "sustained_flops_per_second.bf = 'bf': input should be 'fp64'",
    ),
    (FAMILY.replace("mi250x", '" mi250x"') + NODE, "' mi250x' is no name: it is empty, or has control characters, or"),
    (
        FAMILY.replace(
            "products = [", "products = [\n  {dtype = 'bf16', shape = [4096, 4096, 4096], flops_per_second = 1.0},"
        )
        + NODE,
        "families.mi250x: products has bf16 [4096, 4096, 4096] twice; keep one",
    ),
    (FAMILY + "[[nodes]]\ndevices = {mi250 = 1}", "nodes.0.devices: no family 'mi250'; did you mean 'mi250x'?"),
    (FAMILY + "[[nodes]]\ndevices = {}", "nodes.0.devices = {}: dictionary should have at least 1 item"),
    (
        FAMILY + "[[nodes]]\ndevices = {mi250x = 2}",
        "nodes.0: 2 devices on a node, and nothing said of the link between",
    ),
    (
        FAMILY
        + NODE
        + "nics = [{fabric = 'ib', origin = 'assumed', send_bytes_per_second = 1e9, receive_bytes_per_second = 1e9}]",
        "nodes.0.nics.0.fabric: no fabric 'ib'; none is described",
    ),
    (FAMILY + NODE + "ranks = [0, 1]", "nodes.0: 2 ranks for 1 x 1 devices; give one for each, or none"),
    (FAMILY + NODE + "ranks = [1]", "nodes.*.ranks: rank 0 is in none of them; list 0 to 0 once each"),
    (
        FAMILY + NODE + "ranks = [0]\n" + NODE,
        "nodes.1.ranks: missing, other nodes have theirs; set it for all or for none",
    ),
    (FAMILY + NODE + NODE, "nodes.0 and nodes.1: no fabric in common (none; none); give both a NIC on the same one"),
    (
        TEXT.replace('fabric = "ethernet", send', 'fabric = "ib", send', 1),
        "nodes.0 and nodes.1: no fabric in common (ib; ethernet, sling)",
    ),
    (
        TEXT.replace('["mi250x", "a100"]', '["mi250x", "a10"]'),
        "links.0.families: no family 'a10'; did you mean 'a100'?",
    ),
    (
        TEXT.replace('fabric = "ethernet"\norigin', 'fabric = "ethernot"\norigin'),
        "links.0.fabric: no fabric 'ethernot'; did",
    ),
    (
        TEXT + TEXT[TEXT.index("[[links]]") :].replace('["mi250x", "a100"]', '["a100", "mi250x"]'),
        "links.1: these families' link is described above already; keep one",
    ),
    (
        FAMILY + NODE + PROFILE + "times = [{rows = 2, ONE}, {rows = 1, ONE}]".replace("ONE", ONE),
        "profiles.0: times are of rows [2, 1]; list each number of rows once, in ascending order",
    ),
    (
        FAMILY + NODE + PROFILE.replace("mi250x", "mi300x") + f"times = [{{rows = 1, {ONE}}}]",
        "profiles.0.family: no family 'mi300x'; did you mean 'mi250x'?",
    ),
    (
        FAMILY + NODE + 2 * (PROFILE + f"times = [{{rows = 1, {ONE}}}]\n"),
        "profiles.1: this family's work in this ZeRO stage is above already; keep one",
    ),
    (FAMILY + NODE + PROFILE + "times = []", "profiles.0.times"),
    (FAMILY + NODE + "[truth]\ntime_scal = 3", "truth.time_scal: unknown key; did you mean 'time_scale'?"),
    (FAMILY + NODE + "[truth]\ntime_scale = 0", "truth.time_scale = 0: input should be greater than or equal to"),
]


@pytest.mark.parametrize(("text", "message"), BAD_FILES)
def test_bad_files_name_the_key(text, message, write):
    path = write(text)
    with pytest.raises(TopologyError) as caught:
        load_cluster(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


def test_files_that_cannot_be_read_are_named(tmp_path, write):
    with pytest.raises(TopologyError, match="none.toml: cannot be read: No such file or directory"):
        load_cluster(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(TopologyError, match="binary.toml: not valid TOML"):
        load_cluster(tmp_path / "binary.toml")
    assert read_cluster_file(write(FAMILY + NODE)).truth is None
