"""Compile every fused kernel for NVIDIA devices that are not there, by a torch that is built for CUDA.

    python -m benchmarks.compile_kernels                    # sm_75, sm_80, sm_90, sm_100
    python -m benchmarks.compile_kernels --capability 90

It shows that Triton takes them, and in how many kernels. It does not run them. Torch is told what a device would say of
itself; that fits torch 2.11. bf16 is left out before sm_80, which has none.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import click
import torch

from hpctrain.comm.accelerators.compiling import IN_ONE_ORDER
from hpctrain.model.operators import activation, loss, norm, rotary
from hpctrain.model.operators.norm import LayerNorm, RmsNorm

CAPABILITIES = (75, 80, 90, 100)
N, F, V, FFN, HEADS, KV_HEADS, HEAD = 8192, 2048, 32000, 5632, 32, 4, 64  # tokens and sizes of llama-1b
FP32, INT64 = torch.float32, torch.int64
Shape = tuple[tuple[int, ...], torch.dtype]


def cases(dtype: torch.dtype) -> Iterator[tuple[str, Callable, list[Shape]]]:
    """Yield names, functions, and the shapes of their arguments."""
    x, row, w = ((N, F), dtype), ((N, 1), FP32), ((F,), FP32)
    heads = [((N * HEADS, HEAD), dtype)] * 2 + [((HEAD,), FP32), ((N * HEADS, 1), FP32)]
    angles = [((N // 4, 1, HEAD // 2), FP32)] * 2
    heads_of = [((4, N // 4, count, HEAD), dtype) for count in (HEADS, KV_HEADS, KV_HEADS)]
    part, ids = ((N // 4, V), dtype), ((N // 4,), INT64)
    one = ((N // 4,), FP32)
    of, of_heads = {"features": F, "offset": 0.0}, {"features": HEAD, "offset": 0.0}
    yield "rms_norm", partial(RmsNorm.forward, epsilon=1e-5, **of), [x, w]
    yield "rms_norm, cut by x", partial(RmsNorm.forward, epsilon=1e-5, **of), [x, w, row]
    yield "rms_norm, again", partial(RmsNorm.from_statistics, offset=0.0), [x, w, row]
    yield "squares_of", norm.squares_of, [x]
    yield "rms_norm backward_sums", partial(RmsNorm.backward_sums, offset=0.0), [x, x, w, row]
    yield "rms_norm backward", partial(RmsNorm.backward, features=F, offset=1.0), [x, x, w, row]
    of_sum = partial(norm.backward_of_sum, backward=RmsNorm.backward)
    yield "rms_norm of a sum backward", partial(of_sum, **of), [x, x, x, w, row]
    yield "rms_norm backward of heads", partial(RmsNorm.backward, **of_heads), heads
    yield "layer_norm", partial(LayerNorm.forward, epsilon=1e-5, **of), [x, w, w]
    yield "layer_norm backward", partial(LayerNorm.backward, **of), [x, x, w, w, row, row]
    yield "rotate", rotary.forward, [((4, N // 4, HEADS + KV_HEADS, HEAD), dtype), *angles]
    yield "rotate backward", rotary.backward, [*angles, *heads_of]
    for kind in ("silu", "gelu"):
        yield f"gated, {kind}", partial(activation.forward, activation=kind), [((N, 2 * FFN), dtype)]
        backward = partial(activation.backward, activation=kind)
        yield f"gated backward, {kind}", backward, [((N, FFN), dtype), ((N, 2 * FFN), dtype)]
    for cap in (None, 30.0):
        settings = {"num_ids": V - 3, "cap": cap}
        yield f"tops, cap {cap}", partial(loss.tops, **settings), [part]
        yield f"loss, cap {cap}", partial(loss.forward, **settings), [part, ids]
        yield f"loss, cut by y, cap {cap}", partial(loss.forward, **settings), [part, ids, one]
        yield f"loss backward, cap {cap}", partial(loss.backward, **settings), [part, one, ids, one]


@contextmanager
def described(capability: int, compiled: list[str]):
    """Have torch believe that there is a device; note in `compiled` the names of kernels."""
    import torch._inductor.runtime.triton_helpers as helpers
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch._subclasses import fake_tensor
    from triton.backends.compiler import GPUTarget

    properties = SimpleNamespace(
        name="described",
        major=capability // 10,
        minor=capability % 10,
        multi_processor_count=132,
        regs_per_multiprocessor=1 << 16,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        total_memory=80 << 30,
        shared_memory_per_block_optin=64 << 10,
    )
    worker = {name: staticmethod(lambda *_: 0) for name in ("current_device", "exchange_device", "set_device")}
    worker |= {"is_available": staticmethod(lambda: True), "device_count": staticmethod(lambda: 1)}
    worker |= {"maybe_exchange_device": staticmethod(lambda *_: 0), "synchronize": staticmethod(lambda *_: None)}
    worker |= {"get_device_properties": staticmethod(lambda *_: properties)}
    worker |= {"get_compute_capability": staticmethod(lambda *_: capability)}
    cuda = {name: lambda *_: 0 for name in ("current_device", "_exchange_device", "_maybe_exchange_device")}
    cuda |= {"is_available": lambda: True, "device_count": lambda: 1, "synchronize": lambda *_: None}
    cuda |= {"get_device_properties": lambda *_: properties, "set_rng_state": lambda *_: None}
    cuda |= {"get_device_capability": lambda *_: divmod(capability, 10)}
    cuda |= {"get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8), "_lazy_init": lambda: None}

    def note(autotuner) -> None:
        compiled.append(autotuner.fn.__name__)
        autotuner.launchers = [lambda *_, **__: None]

    target = GPUTarget("cuda", capability, 32)
    driver = SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0)
    triton.runtime.driver.set_active(driver)
    with ExitStack() as stack:
        of_worker = {key: worker[key] for key in ("current_device", "get_device_properties")}
        for module, names in ((torch.cuda, cuda), (CudaInterface, worker), (CudaInterface.Worker, of_worker)):
            stack.enter_context(patch.multiple(module, **names))
        stack.enter_context(patch.object(fake_tensor, "init_gpu_context", lambda *_: None))
        stack.enter_context(patch.object(helpers, "set_driver_to_gpu", lambda: None))
        stack.enter_context(patch.object(CachingAutotuner, "_make_launchers", note))
        yield


def compile_for_device(function: Callable, shapes: list[Shape]) -> None:
    """Compile a function as a run would. It is traced on the host, which needs no driver."""
    import torch._inductor.config as options
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    def as_tuple(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = function(*tensors)
        return result if isinstance(result, tuple) else (result,)

    cuda = torch.device("cuda", 0)
    with FakeTensorMode() as mode:
        on_host = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
        inputs = [torch.empty(shape, dtype=dtype, device=cuda) for shape, dtype in shapes]
        with patch.object(torch.compiler, "is_compiling", lambda: True):
            graph = make_fx(as_tuple, decomposition_table=select_decomp_table())(*on_host)
        for node in graph.graph.nodes:
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": cuda}
        graph.recompile()
        FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*inputs)
        ours = {IN_ONE_ORDER: True, "dynamic_scale_rblock": False, "compile_threads": 1}
        with options.patch(ours | {"force_disable_caches": True}):
            compile_fx_inner(graph, inputs)


@click.command()
@click.option("--capability", type=int, multiple=True, default=CAPABILITIES, show_default=True)
def command(capability: tuple[int, ...]):
    if not torch.version.cuda:
        sys.exit(f"torch {torch.__version__} is not built for CUDA: install one that is; it needs no GPU")
    failed = 0
    for each in capability:
        for dtype in (torch.bfloat16, torch.float16, torch.float32)[each < 80 :]:
            for name, function, shapes in cases(dtype):
                compiled: list[str] = []
                try:
                    with described(each, compiled):
                        compile_for_device(function, shapes)
                    result = ", ".join(compiled)
                except Exception as error:  # whatever a compiler raises
                    failed, result = failed + 1, f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
                print(f"sm_{each} {str(dtype).removeprefix('torch.'):9} {name:32} {result}", flush=True)
    print(f"{failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    command()
