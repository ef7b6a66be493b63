"""What the operations of torch would cost a described device, by their shapes."""

import torch

from hpctrain.config.truth import PretendDevice

aten = torch.ops.aten
# [m, k] @ [k, n], of operands at these places of the call; `b` products at once.
_PRODUCTS = {aten.mm: (0, 1), aten.addmm: (1, 2), aten.addmm_: (1, 2), aten.bmm: (0, 1), aten.baddbmm: (1, 2)}
# Attention [batch, heads, positions, head size]: two products forward, five backward, of which a causal mask halves.
_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: (0, 1, 2),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (1, 2, 5),
}
# What touches rows of a table and not the whole: by the place of the rows, how often these are passed over.
_ROWS = {aten.embedding: (None, 2), aten.index_add_: (3, 3)}
_FREE = (aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided)
_FILLS = (aten.zero_, aten.fill_, aten.zeros_like, aten.ones_like, aten.full_like, aten.new_zeros, aten.new_ones)
WIDE_PRODUCT = "hpctrain.add_wide_product"
"""Of the model: a product of half precision, added to an fp32 gradient."""
DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


def seconds_of(func, args: tuple, outputs: list[torch.Tensor], device: PretendDevice) -> float:
    """Return the seconds of one operation, given what it was called with and what it returned.

    Products by shape, attention by its products, everything else by the bytes that it reads and writes, of a table by
    those of its rows; what makes a view of memory that was there costs nothing, nor does memory that nobody fills.
    """
    packet = func.overloadpacket
    if str(packet) == WIDE_PRODUCT:
        grad, dy, x = args[:3]
        seconds = device.product_seconds(_name(x), dy.shape[1], dy.shape[0], x.shape[1])
        return seconds + device.pass_seconds(2 * _num_bytes(grad))
    if (places := _PRODUCTS.get(packet)) is not None:
        a, b = (args[place] for place in places)
        batch = a.shape[0] if a.dim() == 3 else 1
        return device.product_seconds(_name(a), a.shape[-2], a.shape[-1], b.shape[-1], batch)
    if (places := _ATTENTION.get(packet)) is not None:
        query, key, products = args[places[0]], args[places[1]], places[2]
        rows = query.shape[0] * query.shape[1]
        causal = any(value is True for value in args)
        share = 0.5 if causal else 1.0
        once = device.product_seconds(_name(query), query.shape[2], query.shape[3], key.shape[2], rows)
        return max(device.launch_seconds, once * products * share)
    if (rows := _ROWS.get(packet)) is not None:
        place, times = rows
        return device.pass_seconds(times * _num_bytes(outputs[0] if place is None else args[place]))
    if packet in _FREE:
        return 0.0
    if packet in _FILLS:
        return device.pass_seconds(_num_bytes(outputs[0]))
    if packet is aten.copy_:
        return device.pass_seconds(_num_bytes(args[0]) + _num_bytes(args[1]))
    inputs = _tensors(args)
    if func._schema.is_mutable:
        pairs = zip(args, func._schema.arguments, strict=False)  # what has a default may be left out
        written = outputs or _tensors([value for value, about in pairs if about.alias_info is not None])
        return device.pass_seconds(sum(map(_num_bytes, (*inputs, *written))))
    own = {tensor.untyped_storage()._cdata for tensor in inputs}
    if any(tensor.untyped_storage()._cdata not in own for tensor in outputs):
        return device.pass_seconds(sum(map(_num_bytes, (*inputs, *outputs))))
    return 0.0


def _tensors(values) -> list[torch.Tensor]:
    """Return the tensors among values and in lists among them."""
    lists = (value if isinstance(value, (tuple, list)) else (value,) for value in values)
    return [value for each in lists for value in each if isinstance(value, torch.Tensor)]


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _name(tensor: torch.Tensor) -> str:
    return DTYPE_NAMES[tensor.dtype]
