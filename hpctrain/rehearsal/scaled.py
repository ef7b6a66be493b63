"""Scales the tables of a cluster file: families, links, and how pretended devices behave. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from hpctrain.config.cluster import MANY_ROWS, Cluster, Family, Figures, LinkClass
from hpctrain.config.errors import TopologyError
from hpctrain.config.tables import Table
from hpctrain.config.truth import PretendDevice, Truth
from hpctrain.planner.devices import DeviceModel

T = TypeVar("T", bound=Table)
TILE = 128
"""Rows and columns of the result that an accelerator computes at once, where nothing is said."""
HALF_SPEED_ROWS = 256.0
"""Rows of the result at which a product reaches half of its speed, where nothing is said."""


@dataclass(frozen=True)
class Scale:
    """What one of the cluster is in its rehearsal."""

    width: int
    """By which widths and positions are divided."""
    item_bytes: int
    """Of a number of the real job: 2 or 4. In the rehearsal it has 4."""
    memory: float
    """Bytes of the rehearsal's memory for one of the cluster's."""

    @property
    def flops(self) -> float:
        return 1 / self.width**3

    @property
    def num_bytes(self) -> float:
        """Bytes of messages, and of what is read and written."""
        return 4 / self.item_bytes / self.width**2

    @property
    def dtype(self) -> str:
        return "half precision" if self.item_bytes == 2 else "fp32"


def speed_of(name: str, family: Family, dtype: str) -> float:
    """Return FLOP/s that large products reach. Raises TopologyError where the family has no speed in the dtype."""
    if dtype not in family.sustained_flops_per_second | family.peak_flops_per_second:
        raise TopologyError(f"families.{name} has no speed in {dtype}; set its peak_flops_per_second, or train.dtype")
    return DeviceModel(name, family).speed(dtype)


def with_speeds(cluster: Cluster, dtypes: Mapping[str, str], dtype: str) -> Cluster:
    """Return a cluster whose families have the speeds of `dtypes` under the name of one dtype, and no other speed."""
    families = {
        name: family.model_copy(
            update={
                "peak_flops_per_second": {},
                "sustained_flops_per_second": {dtype: speed_of(name, family, dtypes[name])},
                "products": (),
            }
        )
        for name, family in cluster.families.items()
    }
    return cluster.model_copy(update={"families": families})


def scale_cluster(cluster: Cluster, dtypes: Mapping[str, str], scale: Scale) -> Cluster:
    """Return the cluster that the rehearsal's planner sees. Profiles are left out: they are of another job."""
    families = {name: _family(name, family, dtypes[name], scale) for name, family in cluster.families.items()}
    nodes = tuple(
        _remade(each, _figures(each, scale) | {"nics": tuple(_scaled(nic, scale) for nic in each.nics)})
        for each in cluster.nodes
    )
    return _remade(
        cluster,
        {
            "families": families,
            "fabrics": {name: _scaled(fabric, scale) for name, fabric in cluster.fabrics.items()},
            "nodes": nodes,
            "links": tuple(_link(link, scale) for link in cluster.links),
            "profiles": (),
        },
    )


def with_exact_links(cluster: Cluster) -> Cluster:
    """Return the cluster with bandwidths of links that count as measured: a pretended network gives all of them."""

    def measured(table: Figures, **values):
        bandwidths = [figure for figure in table.given if figure.endswith("bytes_per_second")]
        return _remade(table, {"origins": table.origins | dict.fromkeys(bandwidths, "measured"), **values})

    return _remade(
        cluster,
        {
            "fabrics": {name: measured(fabric) for name, fabric in cluster.fabrics.items()},
            "nodes": tuple(measured(each, nics=tuple(map(measured, each.nics))) for each in cluster.nodes),
            "links": tuple(map(measured, cluster.links)),
        },
    )


def own_truth(cluster: Cluster, dtypes: Mapping[str, str], tile: int = TILE) -> Truth:
    """Return how devices behave by their families' figures: measured ones, else a data sheet's and the catalogue's.

    A `tile` of 1 is of a finished miniature, whose speed does not depend on the rows of a product.
    """
    devices = {}
    for name, family in cluster.families.items():
        model = DeviceModel(name, family)
        half = half_speed_rows(family) if tile > 1 else family.half_speed_rows or 0.0
        speed = speed_of(name, family, dtypes[name]) * (1 + 1 / MANY_ROWS if half else 1.0)
        devices[name] = PretendDevice(
            memory_bytes=family.memory_bytes,
            memory_bytes_per_second=model.memory_bytes_per_second,
            flops_per_second={dtypes[name]: speed},
            launch_seconds=model.efficiency.launch_seconds,
            tile=(tile, tile),
            half_speed_rows=half,
            overlap_slowdown=model.overlap_slowdown,
            host_copy_bytes_per_second=model.host_copy_bytes_per_second,
        )
    return Truth(devices=devices)


def half_speed_rows(family: Family) -> float:
    """Return at how many rows of the result a family's products have half of their speed."""
    return HALF_SPEED_ROWS if family.half_speed_rows is None else family.half_speed_rows


def scale_truth(own: Truth, given: Truth | None, dtypes: Mapping[str, str], scale: Scale) -> Truth:
    """Return the pretended devices of a rehearsal: those that are `given`, and by their `own` figures the others."""
    devices = own.devices | (given.devices if given else {})
    scaled = {}
    for name, device in devices.items():
        if name not in own.devices:
            continue
        speeds = device.flops_per_second
        halves = [half for half in ("bf16", "fp16") if half in speeds and dtypes[name] != "fp32"]
        dtype = next((known for known in (dtypes[name], *halves) if known in speeds), None)
        speed = speeds[dtype] if dtype else own.devices[name].flops_per_second[dtypes[name]]
        scaled[name] = _remade(
            device,
            {
                **_figures(device, scale),
                "flops_per_second": {"fp32": speed * scale.flops},
                "tile": tuple(max(1, round(size / scale.width)) for size in device.tile),
                "half_speed_rows": device.half_speed_rows / scale.width,
            },
        )
    return Truth(
        memory_scale=scale.memory,
        bandwidth_to_compute_scale=scale.num_bytes / scale.flops,
        width_scale=scale.width,
        devices=scaled,
    )


def _figures(table: Table, scale: Scale) -> dict:
    """Return the figures of a table that are of bytes: bandwidths and sizes of memory."""
    result = {}
    for name in type(table).model_fields:
        value = getattr(table, name)
        if value is not None and name.endswith("bytes_per_second"):
            result[name] = value * scale.num_bytes
        elif value is not None and name.endswith("_bytes"):
            result[name] = max(1, round(value * scale.memory))
    return result


def _scaled(table: T, scale: Scale) -> T:
    return _remade(table, _figures(table, scale))


def _remade(table: T, values: dict) -> T:
    """Return a table with some values replaced. A copy would keep what properties have cached of the old ones."""
    return type(table).model_validate({name: getattr(table, name) for name in type(table).model_fields} | values)


def _family(name: str, family: Family, dtype: str, scale: Scale) -> Family:
    """Return a family in fp32. What the planner would take from the catalogue by its dtype is written down."""
    model, origins = DeviceModel(name, family), dict(family.origins)
    origins.setdefault("sustained_flops_per_second", _origin(family, "sustained_flops_per_second"))
    origins.setdefault("overlap_slowdown", _origin(family, "overlap_slowdown"))
    peak = family.peak_flops_per_second.get(dtype)
    products = {}
    for product in family.products:
        shape = tuple(size // scale.width for size in product.shape)
        if product.dtype == dtype and min(shape) > 0:
            speed = product.flops_per_second * scale.flops
            products[shape] = product.model_copy(update={"dtype": "fp32", "shape": shape, "flops_per_second": speed})
    half = family.half_speed_rows
    if half is None and not products:  # in place of the catalogue's model of tiles, which is of real size
        half = HALF_SPEED_ROWS
        origins["half_speed_rows"] = "assumed"
    return _remade(
        family,
        {
            **_figures(family, scale),
            "origins": origins,
            "peak_flops_per_second": {"fp32": peak * scale.flops} if peak else {},
            "sustained_flops_per_second": {"fp32": model.speed(dtype) * scale.flops},
            "products": tuple(products.values()),
            "half_speed_rows": None if half is None else half / scale.width,
            "overlap_slowdown": model.overlap_slowdown,
        },
    )


def _origin(family: Family, figure: str) -> str:
    return (family.origin_of(figure) if getattr(family, figure) else None) or "assumed"


def _link(link: LinkClass, scale: Scale) -> LinkClass:
    times = tuple(
        time.model_copy(update={"message_bytes": max(1, round(time.message_bytes * scale.num_bytes))})
        for time in link.times
    )
    return _remade(link, _figures(link, scale) | {"times": times})
