"""What a probe without noise would find of a pretended device."""

from collections.abc import Iterable

from hpctrain.config.clusters.cluster import Family, ProductSpeed
from hpctrain.config.clusters.truth import PretendDevice


def probed(kind: str, device: PretendDevice, shapes: Iterable[tuple[int, int, int]]) -> Family:
    """Return a family of such devices, with the speed of fp32 products of some shapes [m, k] @ [k, n]."""
    products = tuple(
        ProductSpeed(
            dtype="fp32",
            shape=(m, k, n),
            flops_per_second=2.0 * m * k * n / device.product_seconds("fp32", m, k, n),
        )
        for m, k, n in shapes
    )
    return Family(
        origin="measured",
        kind=kind,
        memory_bytes=device.memory_bytes,
        memory_bytes_per_second=device.memory_bytes_per_second,
        sustained_flops_per_second={"fp32": max(product.flops_per_second for product in products)},
        products=products,
        overlap_slowdown=device.overlap_slowdown,
        host_copy_bytes_per_second=device.host_copy_bytes_per_second,
    )
