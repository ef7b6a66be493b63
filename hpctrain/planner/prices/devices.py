"""Seconds of operations on a device: as measured, or by its data sheet. Pure.

By the data sheet a product is cut into tiles of its result. The processors compute tiles in waves, the last of which
may be partly empty. Each tile fills a pipeline before it computes (`FILL`). No product is faster than its operands are
read. Where products were measured, the same formula is stretched to go through the measured points.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hpctrain.config.clusters.cluster import HOST_COPY_SHARE, HOST_OPERATION_SECONDS, ITEM_BYTES, Family, Profile
from hpctrain.config.clusters.device_catalogue import ACCELERATORS, lookup
from hpctrain.config.errors import PlanError, did_you_mean
from hpctrain.plan.tiling import Tile
from hpctrain.planner.prices.efficiency import Efficiency, efficiency_of
from hpctrain.planner.prices.setup import Engine
from hpctrain.planner.prices.work import PassWork

# Tiles of a result that libraries choose from, and the share of the largest one's speed that the others reach (cuBLAS
# and CUTLASS; smaller ones read their operands more often).
TILES = ((256, 128, 1.0), (128, 128, 0.96), (128, 64, 0.82), (64, 64, 0.65), (64, 32, 0.45))
SPLITS = (1, 2, 4, 8)
"""Numbers of parts into which a long sum may be cut to keep more processors busy (split-K)."""
SHORTEST_SPLIT = 512
FILL = 96.0
"""Terms of a sum that take as long as a tile's pipeline needs to fill and drain."""
# NVIDIA, Matrix Multiplication Background, 2.2: tensor cores want dims of 16 bytes, and work best with 128 on an A100.
PART_ALIGNED_BYTES, ALIGNED_BYTES, BEST_ALIGNED_BYTES, LESS_ALIGNED_TIMES = 4, 16, 128, 1.05
SLOWEST_WITH_TILES = 1e12
"""FLOP/s below which a device is not its model, but a slow one that stands in for it. Its products have no tiles, and
overlapping slows nothing. Everything else is what its file says. No accelerator of the catalogue is that slow."""

# How far a step may be from its prediction: for devices that were measured, and for those of a data sheet, by
# benchmarks/evidence/predictor.py. Of families that nobody measured: predicted speeds of a MI250X's die are 1.4 times
# the best that was published.
MEASURED_ERROR, DATASHEET_ERROR, UNMEASURED_ERROR = 0.05, 0.15, 0.45


@dataclass(frozen=True)
class DeviceModel:
    """One device of a family."""

    name: str
    family: Family
    fitted: Efficiency | None = None
    """Efficiency that replaces the catalogue's."""
    computes_in: str | None = None
    """The dtype in which its ranks compute, whatever those of other families do."""
    profile: Profile | None = None
    """A profile of the job, which corrects what is modelled here: see `profiled.ProfiledDevice`."""
    element_seconds: float | None = None
    """Seconds of an update by a profile, for each weight that a rank updates."""

    @cached_property
    def efficiency(self) -> Efficiency:
        known = self.fitted or efficiency_of(self.family.kind, self.family.model)
        if not known.known and self.family.like:
            known = replace(efficiency_of(self.family.kind, self.family.like), is_measured=False, best_published="")
        if self._is_scaled_down:
            return replace(known, processors=1, overlap_slowdown=1.0)
        return known if self.family.half_speed_rows is None else replace(known, processors=1)

    @cached_property
    def _is_scaled_down(self) -> bool:
        speeds = [*self.family.peak_flops_per_second.values(), *self.family.sustained_flops_per_second.values()]
        return max(speeds) < SLOWEST_WITH_TILES

    @property
    def overlap_slowdown(self) -> float:
        """Return the factor by which computing takes longer while the device communicates."""
        return self.family.overlap_slowdown or self.efficiency.overlap_slowdown

    def speed(self, dtype: str) -> float:
        """Return FLOP/s of large products. Raises PlanError for a dtype that the family does not have."""
        family, dtype = self.family, self.computes_in or dtype
        if dtype in family.sustained_flops_per_second:
            return family.sustained_flops_per_second[dtype]
        if dtype in family.peak_flops_per_second:
            return family.peak_flops_per_second[dtype] * self.efficiency.share(dtype)
        if dtype == "fp8" and self.efficiency.fp8_gain and "bf16" in family.peak_flops_per_second:
            return self.speed("bf16") * self.efficiency.fp8_gain
        known = sorted({*family.sustained_flops_per_second, *family.peak_flops_per_second})
        raise PlanError(
            f"families.{self.name} has no speed in {dtype}{did_you_mean(dtype, known)};"
            " set its sustained_flops_per_second or peak_flops_per_second, or take another dtype"
        )

    def peak(self, dtype: str) -> float:
        """Return what MFU is a share of: the maker's figure, else the best measured one."""
        return self.family.peak_flops_per_second.get(self.computes_in or dtype) or self.speed(dtype)

    @cached_property
    def operation_seconds(self) -> float:
        """Return what its host needs to start an operation, by the file, else by its model."""
        if self.family.kind == "cpu":
            return 0.0
        name = lookup(self.family.model or "", ACCELERATORS)
        return self.family.operation_seconds or (
            ACCELERATORS[name].operation_seconds if name else HOST_OPERATION_SECONDS
        )

    @cached_property
    def memory_bytes_per_second(self) -> float:
        measured = self.family.origin_of("memory_bytes_per_second") == "measured"
        return self.family.memory_bytes_per_second * (1.0 if measured else self.efficiency.memory_share)

    @property
    def host_copy_bytes_per_second(self) -> float:
        """Return the bandwidth between the device and pinned host memory, one direction."""
        family = self.family
        return family.host_copy_bytes_per_second or HOST_COPY_SHARE * family.memory_bytes_per_second

    @cached_property
    def _cache(self) -> dict[tuple, float]:
        return {}

    def product_seconds(
        self, dtype: str, m: int, k: int, n: int, batch: int = 1, fused: float | None = None, tokens: int = 0
    ) -> float:
        """Return the seconds of `batch` products [m, k] @ [k, n] at once. Raises PlanError for an unknown dtype.

        A `fused` kernel of an accelerator has tiles of its own. There products take that share of a large product's
        speed, whatever their shape and whatever was measured of others. `tokens` is as in `MatrixProduct`.
        """
        dtype = self.computes_in or dtype
        if fused and self.family.kind != "cpu" and not self._is_scaled_down:
            return 2.0 * batch * m * k * n / (self.speed(dtype) * fused * self.efficiency.fused_share)
        key = dtype, m, k, n, batch, tokens
        if key not in self._cache:
            self._cache[key] = self._modelled(*key) * self._correction(dtype, m * batch, k, n)
        return self._cache[key]

    def pass_seconds(self, num_bytes: float) -> float:
        """Return what reading and writing so many bytes takes."""
        return num_bytes / self.memory_bytes_per_second

    def work_seconds(self, work: PassWork, dtype: str, engine: Engine) -> float:
        """Return what computing a pass takes, by products and bytes: the longer of the device's time and its host's."""
        gain = self.efficiency.native_gain if engine.native_attention else 1.0
        computed = sum(
            self.product_seconds(p.dtype or dtype, p.m, p.k, p.n, p.batch, p.fused and p.fused * gain, p.tokens)
            * p.share
            for p in work.products
        )
        computed += self.pass_seconds(work.passed_bytes) + work.operations * self.efficiency.launch_seconds
        started = len(work.products) + work.operations + len(work.exchanges)
        return max(computed, started * engine.dispatch_seconds * self.operation_seconds / HOST_OPERATION_SECONDS)

    def _modelled(self, dtype: str, m: int, k: int, n: int, batch: int, tokens: int = 0) -> float:
        speed, processors = self.speed(dtype), self.efficiency.processors
        common_bytes = math.gcd(*(size for size in (m, k, n) if size != tokens)) * ITEM_BYTES[dtype]
        if batch > 1 and self._misses_tensor_cores(dtype, common_bytes):
            return self._modelled("fp32", m, k, n, batch)
        moved = ITEM_BYTES[dtype] * batch * (m * k + k * n + m * n) / self.memory_bytes_per_second
        if processors == 1:
            slower = self.family.slower_by_rows(m)
            return max(2.0 * batch * m * k * n / speed * slower, moved) + self.efficiency.launch_seconds
        best = math.inf
        for rows, columns, share in TILES:
            tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
            for split in SPLITS:
                if split > 1 and (k < split * SHORTEST_SPLIT or tiles * split > processors):
                    break
                waves = math.ceil(tiles * split / processors)
                best = min(best, waves * 2.0 * rows * columns * (k / split + FILL) * processors / (speed * share))
        return max(best * self._alignment_times(dtype, common_bytes), moved) + self.efficiency.launch_seconds

    def _misses_tensor_cores(self, dtype: str, common_bytes: int) -> bool:
        """Say whether none of the library's batched products for tensor cores can load operands whose dims are
        multiples of so many bytes.

        Heads of 108 and 150 numbers: attention at 11 to 14 TFLOP/s on A100, which compute 19.5 without (BigScience).
        """
        is_half = dtype in ("fp16", "bf16") and "fp32" in self.family.peak_flops_per_second
        return is_half and common_bytes % ALIGNED_BYTES != 0

    def _alignment_times(self, dtype: str, common_bytes: int) -> float:
        """Return how many times as long a product takes for its dims; 1 where no tensor core computes it."""
        if dtype in ("fp32", "fp64") or common_bytes % BEST_ALIGNED_BYTES == 0:
            return 1.0
        if common_bytes % ALIGNED_BYTES == 0:
            return LESS_ALIGNED_TIMES
        is_odd = common_bytes % PART_ALIGNED_BYTES != 0
        return self.efficiency.unaligned_times if is_odd else self.efficiency.part_aligned_times

    @cached_property
    def _measured(self) -> dict[str, list[tuple[tuple[float, float, float], float]]]:
        """Return by dtype each measured shape's place, and by how much the formula is wrong there, in logarithms."""
        result: dict[str, list] = {}
        for product in self.family.products:
            m, k, n = product.shape
            real = 2.0 * m * k * n / product.flops_per_second
            ratio = math.log(real / self._modelled(product.dtype, m, k, n, 1))
            result.setdefault(product.dtype, []).append((_place(m, k, n), ratio))
        return result

    def _correction(self, dtype: str, m: int, k: int, n: int) -> float:
        """Interpolate between measured shapes by inverse squared distance (Shepard 1968) of their logarithms."""
        points = self._measured.get(dtype)
        if not points:
            return 1.0
        place = _place(m, k, n)
        weights = [(1.0 / (math.dist(place, where) ** 2 + 1e-9), ratio) for where, ratio in points]
        return math.exp(sum(w * ratio for w, ratio in weights) / sum(w for w, _ in weights))

    @property
    def error(self) -> float:
        """The share by which a step may differ from its prediction, two times out of three."""
        if self.profile or self.family.products:
            return MEASURED_ERROR
        speeds = "sustained_flops_per_second"
        is_said = speeds in self.family.given and self.family.origin_of(speeds) == "measured"
        is_known = is_said or self._is_scaled_down or self.efficiency.is_measured
        return DATASHEET_ERROR if is_known else UNMEASURED_ERROR

    @property
    def worth(self) -> str:
        """Say how far a step may be from its prediction, and what is known of a family that nobody measured."""
        if self.error != UNMEASURED_ERROR:
            return f"within {self.error:.0%}"
        best = self.efficiency.best_published
        published = f"best published: {best}" if best else "no published training known"
        return f"within {self.error:.0%}: nobody measured it; {published}"

    def assumptions(self, _tiles: Sequence[Tile]) -> list[str]:
        """Return what was assumed of the family rather than given or known of its model."""
        result, key = [], f"families.{self.name}.model"
        if self.error == UNMEASURED_ERROR:
            unknown = "" if self.efficiency.known else "unknown, so "
            result.append(f"{key}: {unknown}how near it comes to its data sheet; steps are {self.worth}")
        elif not self.efficiency.known:
            result.append(f"{key}: unknown, so how near it comes to its data sheet")
        if not self.family.products:
            result.append(f"families.{self.name}.products: speed by shape, by formula")
        return result


def _place(m: int, k: int, n: int) -> tuple[float, float, float]:
    return math.log2(m), math.log2(k), math.log2(n)
