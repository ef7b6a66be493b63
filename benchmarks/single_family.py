"""The best plan on one family of accelerators: this engine beside Megatron-Core and torch's FSDP, as predicted.

    python -m benchmarks.single_family

All three take the fastest plan that one search finds in one space: tensor grids, interleaved pipelines, ZeRO, and
recompute. So the other two have plans that they cannot run today, such as y and z in one grid.
Ours computes attention by cuDNN's kernel (`kernels.attention`), as Megatron-Core does.
What they differ in is described in `hpctrain/software/`, and compared with published runs by
`benchmarks.evidence.predictor`.
"""

import math
from dataclasses import replace

from benchmarks.search import Case
from hpctrain.planner.prices.setup import HPCTRAIN_FUSED
from hpctrain.planner.search.search import search
from hpctrain.software.megatron import MEGATRON_CORE
from hpctrain.software.software import SoftwareSetup
from hpctrain.software.torch_fsdp import FSDP

CASES = {
    "llama-8b on 64 H100": Case((("H100", "NDR", 8),), "llama-8b", 8192, 128, math.inf),
    "llama-70b on 256 H100": Case((("H100", "NDR", 32),), "llama-70b", 8192, 512, math.inf),
    "llama-70b on 1,024 H100": Case((("H100", "NDR", 128),), "llama-70b", 8192, 1024, math.inf),
    "gpt-80b on 1,024 A100": Case((("A100-80", "HDR", 128),), "gpt-80b", 8192, 1024, math.inf),
}
OURS = replace(HPCTRAIN_FUSED, native_attention=True)
PARTS = ("compute", "tensor", "pipeline", "data", "optimizer", "bubble", "hidden")


def main() -> None:
    """Print a line for each case and software, with where the seconds of its best plan are."""
    print(f"| case | software | step, s | of the best other | MFU | {' | '.join(PARTS)} | plan |")
    print(f"|---|---|--:|--:|--:|{'--:|' * len(PARTS)}---|")
    for name, case in CASES.items():
        setups = [replace(case.setup, engine=OURS)]
        setups += [SoftwareSetup.of(case.setup, software) for software in (MEGATRON_CORE, FSDP)]
        best = {setup.engine.name: search(setup, case.global_batch, case.cluster).best for setup in setups}
        for software, timed in best.items():
            other = min(each.seconds for name, each in best.items() if name != software)
            parts = " | ".join(f"{timed.prediction.breakdown_seconds[part]:.3f}" for part in PARTS)
            seconds, mfu = timed.seconds, timed.prediction.mfu
            print(f"| {name} | {software} | {seconds:.3f} | {seconds / other:.3f} | {mfu:.1%} | {parts} |"
                  f" {timed.plan.describe()} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
