"""Speed curves: seconds of a job on each family for any number of rows, through what the profiler measured."""

from collections.abc import Sequence

import numpy as np

from hpctrain.architectures.description import inner_of
from hpctrain.architectures.registry import OPTIONAL
from hpctrain.config.clusters.cluster import Cluster, Profile
from hpctrain.config.clusters.measured_speeds import has_own_speed
from hpctrain.config.job import Job, Model

PROFILED_ZEROS = (1, 2, 3)


class Curve:
    """Seconds as a function of rows: monotone cubics through measured points (PCHIP, Fritsch and Butland 1984).

    Beyond the last point a device keeps the speed (rows per second) of that point. Below the first point it takes the
    seconds of that point. More rows never take less time: a point below an earlier one is raised to it.
    """

    def __init__(self, rows: Sequence[int], seconds: Sequence[float]):
        """`rows` are whole numbers in ascending order."""
        rising = np.maximum.accumulate(np.asarray(seconds, float))
        first, self._last = rows[0], rows[-1]
        inside = _monotone_cubics(np.asarray(rows, float), rising, np.arange(first, self._last + 1))
        self._seconds = [rising[0]] * first + np.maximum.accumulate(inside).tolist()  # rounding must not let it fall

    def __call__(self, rows: int) -> float:
        if rows <= self._last:
            return self._seconds[rows]
        return self._seconds[-1] * rows / self._last


OWN_SIZES = (
    *("head_size", "window", "global_every", "score_cap", "logit_cap"),
    *("num_experts", "experts_per_token", "expert_size", "shared_experts", "dense_layers", "expert_groups"),
)


def _monotone_cubics(x: np.ndarray, y: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Return the values at some places of a monotone cubic Hermite spline through ascending points.

    Slopes are those of PCHIP. At an inner point: the weighted harmonic mean of the slopes of the lines to its
    neighbours. At the ends: the slope of a parabola through three points, limited so that the spline stays monotone.
    """
    if len(x) == 1:
        return np.full(len(at), y[0])
    width = np.diff(x)
    line = np.diff(y) / width
    slope = np.empty_like(y)
    slope[0], slope[-1] = line[0], line[-1]
    if len(x) > 2:
        before, after = 2 * width[1:] + width[:-1], width[1:] + 2 * width[:-1]
        with np.errstate(divide="ignore"):  # a flat line has a harmonic mean of 0
            slope[1:-1] = (before + after) / (before / line[:-1] + after / line[1:])
        for end, (near, far) in ((0, (0, 1)), (-1, (-1, -2))):
            parabola = ((2 * width[near] + width[far]) * line[near] - width[near] * line[far]) / (
                width[near] + width[far]
            )
            slope[end] = min(max(0.0, parabola), 3 * line[near])
    i = np.clip(np.searchsorted(x, at, side="right") - 1, 0, len(x) - 2)
    t, w = (at - x[i]) / width[i], width[i]
    rise = y[i + 1] - y[i]
    return y[i] + t * (
        w * slope[i]
        + t * (3 * rise - w * (2 * slope[i] + slope[i + 1]) + t * (w * (slope[i] + slope[i + 1]) - 2 * rise))
    )


def model_seconds(profile: Profile, num_blocks: int, rows: int) -> float:
    """Return the seconds of some rows through the whole model, forward and backward, without communication."""
    seconds = [
        sum(time.embedding_seconds) + num_blocks * sum(time.block_seconds) + sum(time.head_seconds)
        for time in profile.times
    ]
    return Curve([time.rows for time in profile.times], seconds)(rows)


def describe_work(job: Job, dtype: str) -> str:
    """Describe the work for which a profile of a job holds. The job's vocabulary size is a value."""
    others = sorted(job.precision.by_family.items())
    fused, optimizer = job.kernels.is_fused, job.train.optimizer
    return describe_training(job.model, job.data.sequence_length, dtype, others, fused, optimizer)


def describe_training(
    m: Model,
    positions: int,
    dtype: str,
    by_family: Sequence[tuple[str, str]] = (),
    fused: bool = False,
    optimizer: str = "adamw",
) -> str:
    """Describe the work as `describe_work`, for a model, rows of so many positions, a dtype, and the dtypes of some
    families.

    AdamW has no name in the text, as profiles had none before there were other optimizers. Families of devices with a
    speed of their own are left out: they do the same work.
    """
    others = "".join(f"; {family} in {own}" for family, own in by_family if not has_own_speed(family))
    head = "tied" if m.tie_head else "untied"
    attention = m.description.blocks[0].attention
    updated = "" if optimizer == "adamw" else f"; {optimizer}"
    return (
        f"{m.architecture}: {m.num_layers} layers, hidden {m.hidden_size}, {m.num_heads} heads"
        f" ({attention.kv_heads} for keys), ffn {inner_of(m)}, vocabulary {m.vocab_size} {head};"
        f" {positions} positions; {dtype}{_more(m)}{others}{updated}{'; fused kernels' if fused else ''}"
    )


def _more(model: Model) -> str:
    """Return the sizes that most models do not have, such as `; head_size 128`."""
    return "".join(f"; {key} {value}" for key in OWN_SIZES if (value := getattr(model, key)) != OPTIONAL[key])


def profiles_of(cluster: Cluster, job: Job, dtype: str) -> dict[str, dict[int, Profile]]:
    """Return the cluster's profiles of a job, by family and ZeRO stage: those made with as many devices as it has."""
    result: dict[str, dict[int, Profile]] = {}
    for profile in cluster.profiles:
        if _is_of(profile, job, dtype) and profile.replicas == cluster.num_devices:
            result.setdefault(profile.family, {})[profile.zero] = profile
    return result


def is_profiled(cluster: Cluster, job: Job, dtype: str) -> bool:
    """Say whether all families of the cluster's devices have profiles of the job, in all ZeRO stages."""
    result = profiles_of(cluster, job, dtype)
    return all(
        {zero for zero, of in result.get(device.family, {}).items() if of.largest_rows is not None}
        == set(PROFILED_ZEROS)
        for device in cluster.devices
    )


def has_times(cluster: Cluster, job: Job, dtype: str) -> bool:
    """Say whether passes over the items of a job were measured on all families of the cluster's devices."""
    known = {profile.family for profile in cluster.profiles if _is_of(profile, job, dtype) and profile.zero == 1}
    return {device.family for device in cluster.devices} <= known


def _is_of(profile: Profile, job: Job, dtype: str) -> bool:
    """Say whether a profile holds for a job: with its kernels, or with any where these are `auto`."""
    is_open = job.kernels.fused is None
    choices = [job.kernels.model_copy(update={"fused": each}) for each in (True, False)] if is_open else [job.kernels]
    return profile.work in [describe_work(job.model_copy(update={"kernels": each}), dtype) for each in choices]
