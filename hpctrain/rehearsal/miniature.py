"""Scales a cluster of real size and its job down together, so that CPU ranks can rehearse both. Pure.

With widths and positions divided by W, a product needs W^3 times fewer operations, and tensors have W^2 times fewer
numbers. So FLOP/s are divided by W^3 and bytes/s by W^2. Numbers of a rehearsal are fp32: where the job's are half
precision, bytes/s are doubled. Seconds then stay what they are, and so do latencies and launches.

A cluster whose fastest family is below `SLOWEST_WITH_TILES` is a finished miniature, and is taken as it is.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from hpctrain.architectures.description import head_size_of, inner_of
from hpctrain.config.clusters.cluster import ITEM_BYTES, MANY_ROWS, Cluster, Family, Figures
from hpctrain.config.clusters.truth import PretendDevice, Truth
from hpctrain.config.errors import PlanError, TopologyError
from hpctrain.config.job import Job
from hpctrain.config.parallelism import PlanRequest
from hpctrain.config.tables import Table
from hpctrain.plan.tiling import Plan
from hpctrain.plan.uniform import resolve_plan
from hpctrain.planner.prediction.predictor import Predictor, predict
from hpctrain.planner.prices.cost import model_flops
from hpctrain.planner.prices.devices import SLOWEST_WITH_TILES, DeviceModel
from hpctrain.planner.prices.setup import Setup

T = TypeVar("T", bound=Table)
NETWORK = ("fabrics", "nodes", "links")
"""Keys of a cluster file."""
TILE = 128
"""Rows and columns of the result that an accelerator computes at once, where nothing is said."""
HALF_SPEED_ROWS = 256.0
"""Rows of the result at which a product reaches half of its speed, where nothing is said."""


@dataclass(frozen=True)
class Scale:
    """The scales between a cluster and its rehearsal."""

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


def with_exact_links(cluster: Cluster) -> Cluster:
    """Return the cluster with bandwidths of links that count as measured: a pretended network gives all of them."""

    def as_measured(table: Table) -> dict:
        if not isinstance(table, Figures):
            return {}
        bandwidths = [figure for figure in table.given if figure.endswith("bytes_per_second")]
        return {"origins": table.origins | dict.fromkeys(bandwidths, "measured")}

    return _remade(cluster, {name: _mapped(getattr(cluster, name), as_measured) for name in NETWORK})


def truth_of(cluster: Cluster, given: Truth | None, dtypes: Mapping[str, str], tile: int = TILE) -> Truth:
    """Return how devices behave: as the file's own table says, and where it says nothing, as their families' figures
    do. A speed in one half precision stands for the other. `tile` is of `_device_by_figures`."""
    given, devices = given or Truth(), {}
    for name, family in cluster.families.items():
        by_figures = partial(_device_by_figures, name, family, dtype := dtypes[name], tile)
        device = given.devices.get(name) or by_figures()
        speeds = device.flops_per_second
        halves = () if dtype == "fp32" else ("bf16", "fp16")
        known = next((speeds[each] for each in (dtype, *halves) if each in speeds), None)
        speed = known or by_figures().flops_per_second[dtype]
        devices[name] = _remade(device, {"flops_per_second": speeds | {dtype: speed}})
    return given.model_copy(update={"devices": devices})


def _device_by_figures(name: str, family: Family, dtype: str, tile: int) -> PretendDevice:
    """Return how a device behaves by measured figures, else by those of a data sheet and of the catalogue.

    A `tile` of 1 is of a finished miniature, whose speed does not depend on the rows of a product.
    """
    model = DeviceModel(name, family)
    unsaid = HALF_SPEED_ROWS if tile > 1 else 0.0
    half = unsaid if family.half_speed_rows is None else family.half_speed_rows
    return PretendDevice(
        memory_bytes=family.memory_bytes,
        memory_bytes_per_second=model.memory_bytes_per_second,
        flops_per_second={dtype: speed_of(name, family, dtype) * (1 + 1 / MANY_ROWS if half else 1.0)},
        launch_seconds=model.efficiency.launch_seconds,
        tile=(tile, tile),
        half_speed_rows=half,
        overlap_slowdown=model.overlap_slowdown,
        host_copy_bytes_per_second=model.host_copy_bytes_per_second,
    )


def scale_truth(truth: Truth, dtypes: Mapping[str, str], scale: Scale) -> Truth:
    """Return the pretended devices of a rehearsal."""
    scaled = {}
    for name, device in truth.devices.items():
        scaled[name] = _remade(
            device,
            {
                **_figures(device, scale),
                "flops_per_second": {"fp32": device.flops_per_second[dtypes[name]] * scale.flops},
                "tile": tuple(max(1, round(size / scale.width)) for size in device.tile),
                "half_speed_rows": device.half_speed_rows / scale.width,
            },
        )
    return Truth(
        memory_scale=scale.memory * scale.width**2,
        bandwidth_to_compute_scale=scale.num_bytes / scale.flops,
        width_scale=scale.width,
        devices=scaled,
        events=truth.events,
    )


def _figures(table: Table, scale: Scale) -> dict:
    """Return the figures of a table that are of bytes, scaled: bandwidths, and sizes of memory and of messages."""
    result = {}
    for name in type(table).model_fields:
        value = getattr(table, name)
        if value is not None and name.endswith("bytes_per_second"):
            result[name] = value * scale.num_bytes
        elif value is not None and name.endswith("_bytes"):
            result[name] = max(1, round(value * (scale.num_bytes if name == "message_bytes" else scale.memory)))
    return result


def _mapped(value: Any, change: Callable[[Table], dict]) -> Any:
    """Return what a cluster file has under a key, with the values that `change` returns for each table in it."""
    if isinstance(value, Table):
        return _remade(
            value, {name: _mapped(getattr(value, name), change) for name in type(value).model_fields} | change(value)
        )
    if isinstance(value, dict):
        return {name: _mapped(each, change) for name, each in value.items()}
    return tuple(_mapped(each, change) for each in value) if isinstance(value, tuple) else value


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


SMALL_HIDDEN = 512
"""A job with a smaller hidden size is not scaled: local ranks train it as it is."""
LEAST_HIDDEN, LEAST_HEAD, LEAST_POSITIONS, LEAST_VOCABULARY = 64, 2, 16, 64
FFN_MULTIPLE = 16
"""A scaled feed-forward part keeps divisors up to this one, so that tensor grids can cut it as before."""

# Calibrated by hand on two cores with the seven ready clusters and the job `mixed`, whose plans may compute one row at
# a time: time scales of 1.1 to 6.
OPERATIONS_PER_ITEM = 70
"""Operations of torch in a forward and a backward pass of one item."""
OPERATION_SECONDS = 80e-6
"""What a watched operation on small tensors takes a core."""
CORE_FLOPS_PER_SECOND = 40e9
UPDATE_SHARE = 0.05
"""Share of a step that the updates at its end may take. Many small operations come at once there, and none to wait for.
Of a job with a small batch it decides (4 ranks, 16 rows, 4 layers: overrun 16 % at 1.6 s, 1.3 % at 4 s)."""
BUSY_SHARE, RANKS_OF_CORE = 0.33, 4
"""Share of the cores' time that real work may take with up to so many ranks on a core; else ranks miss deadlines. Eight
ranks on each core had an overrun of 1.5 % at that share."""


@dataclass(frozen=True)
class Miniature:
    """A cluster and a job as they are rehearsed."""

    cluster: Cluster
    truth: Truth
    job: Job
    scale: Scale | None
    """None: the cluster's file was a finished miniature."""
    real_job: Job
    real_times: float | None = None
    """Seconds of a step of the real job on the real cluster over those of the rehearsal, both predicted for one even
    plan. None: nothing was scaled, or no even plan cuts the job."""

    @property
    def is_job_scaled(self) -> bool:
        """Say whether the job is another one; its token file then does not fit its vocabulary."""
        return self.job.model != self.real_job.model

    def describe(self, name: str) -> str:
        """Say by how much was scaled, in one line."""
        parts, now, real = [], self.job, self.real_job
        if self.is_job_scaled:
            sizes = (
                ("hidden", real.model.hidden_size, now.model.hidden_size),
                ("positions", real.data.sequence_length, now.data.sequence_length),
                ("vocabulary", real.model.vocab_size, now.model.vocab_size),
            )
            width = self.truth.width_scale
            parts.append(", ".join(f"{what} {before} -> {after}" for what, before, after in sizes) + f" (1/{width})")
        else:
            parts.append("the job as it is")
        if self.scale:
            factors = ("FLOP/s", self.scale.flops), ("bytes/s", self.scale.num_bytes), ("memory", self.scale.memory)
            for what, factor in factors:
                parts.append(f"{what} x {factor:.3g}" if factor > 0.5 else f"{what} 1/{1 / factor:,.0f}")
            parts.append(f"fp32 represents {self.scale.dtype}")
            if self.real_times:
                times = f"the real job is predicted to take {self.real_times:.2f} times as long"
                parts.append(f"{times}: {self._difference}")
        else:
            parts.append("the cluster as it is")
        return f"rehearsal of {name}: {'; '.join(parts)}; {self.truth.time_scale:g} s for one of the cluster"

    @property
    def _difference(self) -> str:
        """Say why a step of the real job, as `plan search` and `predict` have it, takes another time."""
        tiles = "its products have tiles of real size"
        if self.scale and self.scale.item_bytes == 2:
            return f"it casts between fp32 and half precision, its gradients and moments are fp32, {tiles}"
        return tiles


def is_finished(cluster: Cluster, truth: Truth | None) -> bool:
    """Say whether a cluster is a miniature already: the file says how it was scaled, or no family has 1 TFLOP/s."""
    return bool(truth and "width_scale" in truth.model_fields_set) or all(
        speed < SLOWEST_WITH_TILES
        for family in cluster.families.values()
        for speed in (*family.peak_flops_per_second.values(), *family.sustained_flops_per_second.values())
    )


def miniature(
    cluster: Cluster, truth: Truth | None, job: Job, cores: int, time_scale: float | None = None
) -> Miniature:
    """Return what is rehearsed of a cluster and a job on so many cores.

    The job's vocabulary size is a value. Without a `truth` devices behave as the cluster's own figures say.
    `time_scale` overrides that of the truth; without both it is resolved so that the cores keep up.

    Memory is scaled by one factor: what a rank needs for the scaled job over what it needs for the real one. Both are
    by the planner's memory model, for the same even plan on all devices. Weights, moments and activations shrink
    by different factors, so the share of memory that the job fills is kept for the sum, not for each part.
    `truth.memory_scale` sets the factor instead: memory is divided by W^2 and multiplied by it.

    Raises TopologyError where a family has no speed in the job's dtype.
    """
    if is_finished(cluster, truth):
        scaled = scale_for_finished(truth, job)
        result, scale = cluster, None
        own = truth_of(cluster, truth, {name: "fp32" for name in cluster.families}, tile=1)
        given = own.time_scale if truth else None
    else:
        width = choose_width(job)
        dtypes = dtypes_of(cluster, job)
        is_half = all(ITEM_BYTES[dtype] == 2 for dtype in dtypes.values())
        scaled = scale_job(job, width)
        if truth and "memory_scale" in truth.model_fields_set:
            memory = truth.memory_scale / width**2
        else:
            memory = _memory_scale(cluster, job, scaled, is_half)
        scale = Scale(width, 2 if is_half else 4, memory)
        families = {name: _family(name, family, dtypes[name], scale) for name, family in cluster.families.items()}
        network = {name: _mapped(getattr(cluster, name), partial(_figures, scale=scale)) for name in NETWORK}
        # Profiles are left out: they are of another job.
        result = _remade(cluster, {**network, "families": families, "profiles": ()})
        own = scale_truth(truth_of(cluster, truth, dtypes), dtypes, scale)
        given = truth.time_scale if truth and "time_scale" in truth.model_fields_set else None
    seconds = time_scale or given or choose_time_scale(result, own, scaled, cores)
    result = with_exact_links(result)
    times = _real_times(job, cluster, scaled, result, scale) if scale else None
    return Miniature(result, own.model_copy(update={"time_scale": seconds}), scaled, scale, job, times)


def dtypes_of(cluster: Cluster, job: Job) -> dict[str, str]:
    """Return which dtype of each family fp32 represents. Raises TopologyError where a family does not have it.

    Where the job's is `auto`: half precision if all families are accelerators that have it, else fp32.
    """
    halves = {}
    for name, family in cluster.families.items():
        speeds = family.sustained_flops_per_second | family.peak_flops_per_second
        counts = family.kind != "cpu" or job.train.dtype is not None
        halves[name] = next((dtype for dtype in ("bf16", "fp16") if counts and dtype in speeds), None)
    if job.train.dtype != "fp32" and all(halves.values()):
        return halves
    if job.train.dtype == "bf16":
        name = next(name for name, dtype in halves.items() if dtype is None)
        raise TopologyError(
            f"families.{name} has no speed in bf16 or fp16; set its peak_flops_per_second, or train.dtype to fp32"
        )
    for name, family in cluster.families.items():
        speed_of(name, family, "fp32")
    return dict.fromkeys(cluster.families, "fp32")


def choose_width(job: Job) -> int:
    """Return W, a power of two: the largest that the job can be scaled by; 1 for a job that is small already."""
    width = 1
    if job.model.hidden_size >= SMALL_HIDDEN:
        while can_be_scaled(job, 2 * width):
            width *= 2
    return width


def can_be_scaled(job: Job, width: int) -> bool:
    """Say whether widths and positions can be divided by so much, and heads be as many as before."""
    model = job.model
    return (
        model.hidden_size >= LEAST_HIDDEN * width
        and head_size_of(model) % (LEAST_HEAD * width) == 0  # and so RoPE has pairs
        and job.data.sequence_length >= LEAST_POSITIONS * width
    )


def scale_for_finished(truth: Truth | None, job: Job) -> Job:
    """Return the job that a finished miniature is for: scaled as its truth says, or as it is where it is small."""
    width = truth.width_scale if truth else 1
    return scale_job(job, width) if width > 1 and can_be_scaled(job, width) else job


def scale_job(job: Job, width: int) -> Job:
    """Return the job with widths, positions and vocabulary divided; layers, heads, rows and plan stay as they are.

    It computes in fp32, whatever the dtype of the job.
    """
    train = job.train.model_copy(update={"dtype": "fp32"})
    if width == 1:
        return job.model_copy(update={"train": train})
    model, data = job.model, job.data

    def inner(size: int) -> int:
        kept = math.gcd(size, FFN_MULTIPLE)
        return kept * max(1, round(size / width / kept))

    sizes = {
        "hidden_size": model.hidden_size // width,
        "num_kv_heads": model.num_kv_heads,
        "head_size": model.head_size and model.head_size // width,
        "window": model.window and math.ceil(model.window / width),
        "ffn_size": inner(inner_of(model)),
        "expert_size": model.expert_size and inner(model.expert_size),
        "vocab_size": max(LEAST_VOCABULARY, math.ceil(model.num_ids / width)),
        "max_positions": math.ceil(model.max_positions / width),
    }
    length = round(data.sequence_length / width)
    bucket_bytes = max(1, round(job.overlap.bucket_bytes / width**2))
    return job.model_copy(
        update={
            "model": model.model_copy(update=sizes),
            "data": data.model_copy(update={"sequence_length": length}),
            "train": train,
            "overlap": job.overlap.model_copy(update={"bucket_bytes": bucket_bytes}),
        }
    )


def choose_time_scale(cluster: Cluster, truth: Truth, job: Job, cores: int) -> float:
    """Return how many seconds of the rehearsal one of the cluster takes, so that the cores keep up; two digits.

    Real seconds of a step are those of all operations of all ranks, one row at a time, over the cores. Pretended
    seconds are those of all devices at their full speed, or of launches where these take longer: real steps have
    more time, not less. Neither may the updates at the end of a step take more than their share of it.
    """
    flops = model_flops(Setup.of_job(job, "fp32"), job.train.global_batch * job.data.sequence_length)
    at_once = min(cores, cluster.num_devices)
    item_seconds = OPERATIONS_PER_ITEM * OPERATION_SECONDS / at_once
    num_layers = job.model.num_layers + 2  # with both ends
    update = cluster.num_devices * num_layers * item_seconds
    passes = job.train.global_batch * (num_layers - 1) * item_seconds
    crowd = max(1.0, cluster.num_devices / at_once / RANKS_OF_CORE)  # the more ranks share a core, the later they wake
    real = (passes + update + flops / CORE_FLOPS_PER_SECOND / at_once) / BUSY_SHARE * crowd**0.5
    devices = [truth.devices[device.family] for device in cluster.devices]
    launches = OPERATIONS_PER_ITEM * min(device.launch_seconds for device in devices)  # the least that an item takes
    one_row = launches * job.train.global_batch * (num_layers - 1) / len(devices)
    pretended = max(flops / sum(max(device.flops_per_second.values()) for device in devices), one_row)
    of_update = UPDATE_SHARE * pretended + launches * num_layers
    return float(f"{max(real / pretended, update / of_update):.2g}")


def _memory_scale(cluster: Cluster, real: Job, scaled: Job, is_half: bool) -> float:
    """Return the factor that keeps the share of memory that a job fills, as `miniature` says."""
    needed = []
    try:
        plan = _even_plan(real, cluster)
        for job, dtype in ((scaled, "fp32"), (real, "bf16" if is_half else "fp32")):
            memory = Predictor(Setup.of_job(job, dtype), plan, cluster).memory
            needed.append(max(stage.memory.total for stage in memory))
    except PlanError:  # a job that no even plan cuts
        needed = [4 * scaled.model.hidden_size**2, (2 if is_half else 4) * real.model.hidden_size**2]
    return needed[0] / needed[1]


def _real_times(real: Job, cluster: Cluster, scaled: Job, rehearsed: Cluster, scale: Scale) -> float | None:
    """Return `Miniature.real_times`."""
    try:
        plan = _even_plan(real, cluster)
        dtype = dtypes_of(cluster, real).popitem()[1] if scale.item_bytes == 2 else "fp32"
        dtypes = tuple(sorted(dtypes_of(cluster, real).items()))
        setup = replace(Setup.of_job(real, dtype), by_family=dtypes)
        seconds = (predict(setup, plan, cluster), predict(Setup.of_job(scaled, "fp32"), plan, rehearsed))
    except PlanError:  # a job that no even plan cuts
        return None
    return seconds[0].step_seconds / seconds[1].step_seconds


def _even_plan(job: Job, cluster: Cluster) -> Plan:
    """Return the plan of a job, or, where it is `auto`, the deepest even one. Raises PlanError where there is none."""
    ranks, families = cluster.num_devices, [device.family for device in cluster.devices]
    request = job.plan
    if request is None:
        depths = (n for n in range(min(ranks, job.model.num_layers), 0, -1) if ranks % n == 0)
        depth = next((n for n in depths if job.train.global_batch % (ranks // n) == 0), None)
        if depth is None:
            raise PlanError(f"train.global_batch {job.train.global_batch} cannot be cut evenly for {ranks} ranks")
        request = PlanRequest(pipeline=depth, data=ranks // depth, microbatch=1)
    return resolve_plan(job.model_copy(update={"plan": request}), ranks, families).plan
