"""Functions of tensors compiled for a device: several operations become one kernel, by Triton or in C++."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hpctrain.comm.accelerators.kinds import Ability

# In this process: it would start as many others as the host has cores, for each rank. What a compiled function is for
# is known before it is called, so torch's own checks are left out. Nothing that orders a sum is selected by a
# measurement: ranks that hold copies of a norm, and a run that continues, would have other last bits.
OPTIONS: dict[str, str | int | bool | Callable] = {
    "compile_threads": 1,
    "guard_filter_fn": lambda guards: [False] * len(guards),
    "dynamic_scale_rblock": False,
}
IN_ONE_ORDER = "deterministic"
"""Torch's option that selects one configuration of each sum. Torch 2.8 has none, and does so where all of torch is
deterministic."""


class Compiled:
    """Pure functions compiled for one device, once for each shape, so that results do not depend on earlier shapes.

    The functions must not change their tensors or communicate, and may use only torch operations. Otherwise their first
    call raises.
    """

    def __init__(self):
        self._made: dict[tuple, Callable] = {}

    def __call__(self, function: Callable, *tensors: torch.Tensor, **constants):
        """Return the result of a function of tensors and constants. Autograd does not record it."""
        key = function, *((each.shape, each.stride(), each.dtype) for each in tensors), *constants.values()
        made = self._made.get(key)
        if made is not None:
            return made(tensors)
        result, self._made[key] = _compile(function, [each.detach() for each in tensors], constants)
        return result


def _compile(function: Callable, tensors: list[torch.Tensor], constants: dict) -> tuple[Any, Callable]:
    """Return the result of a function, and a callable that computes it for other tensors of the same shapes.

    It is the callable that torch compiles itself. The wrapper that torch returns first checks its arguments, which
    takes longer than the call. The first call shows which tensors go in and out, and in which order.
    """
    from torch._dynamo.eval_frame import innermost_fn
    from torch._inductor.compile_fx import compile_fx

    calls: list[tuple[Callable, tuple, Sequence]] = []

    def backend(graph: torch.fx.GraphModule, examples: list[torch.Tensor], options: dict) -> Callable:
        inner = innermost_fn(compile_fx(graph, examples, config_patches=options))  # pyright: ignore[reportArgumentType]

        def noting(*given):
            calls.append((inner, given, made := inner(*given)))
            return made

        return noting

    def compiled(*tensors: torch.Tensor):
        return function(*tensors, **constants)

    compiled.__code__ = compiled.__code__.replace()  # torch keeps what is compiled, and a limit, for each code object
    options = OPTIONS | ({IN_ONE_ORDER: True} if IN_ONE_ORDER in torch._inductor.list_options() else {})
    wrapped = torch.compile(compiled, backend=backend, fullgraph=True, dynamic=False, options=options)
    result = wrapped(*tensors)
    (inner, given, made), is_one = calls.pop(), isinstance(result, torch.Tensor)
    taken = [_place(each, tensors) for each in given]
    returned = [_place(each, [*made, *tensors]) for each in ([result] if is_one else result)]

    def call(tensors: tuple[torch.Tensor, ...]):
        made = inner(*(tensors[place] for place in taken))
        if is_one:
            return made[returned[0]]
        every = *made, *tensors
        return [every[place] for place in returned]

    return result, call


def _place(tensor: torch.Tensor, among: Sequence[torch.Tensor]) -> int:
    """Return the index of a tensor among others. Raises RuntimeError where torch passes copies."""
    for place, each in enumerate(among):
        if each is tensor:
            return place
    raise RuntimeError(f"torch {torch.__version__} hands copies of tensors to what it compiled, or from it")


def _trial(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x.sum(dim=-1, keepdim=True))


def try_compile(device: torch.device) -> Ability:
    """Say whether functions can be compiled for a device, by compiling a small one for a few seconds. Never raises."""
    try:
        run, x = Compiled(), torch.linspace(-1, 1, 64, device=device).view(4, 16)
        results = run(_trial, x), run(_trial, x)  # the second call takes the path of all later ones
        if all(torch.allclose(each, _trial(x), atol=1e-5) for each in results):
            return Ability(True, "torch.compile gives the same numbers as operations one by one")
        return Ability(False, "torch.compile gives other numbers than operations one by one")
    except Exception as error:  # without a compiler, and whatever else a compiler raises
        lines = str(error).strip().splitlines() or [""]
        reason = f"torch.compile: {type(error).__name__}: {lines[0][:200]}"
        return Ability(False, f"{reason} (it needs g++ and, for devices, Triton)")
