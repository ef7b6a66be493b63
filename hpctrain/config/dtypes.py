"""Which dtype a job trains in where it leaves that open. Pure."""

from collections.abc import Mapping

TRAINED_DTYPES = ("bf16", "fp32")
HALF_PAYS_ON_CPUS, HALF_PAYS = 4.0, 1.5
"""By how much large products must be faster in bf16 than in fp32 for it to be taken.

CPUs without matrix units (AMX) reach 0.01 to 2.2 times the speed of fp32, those with them 8 times and more. GPUs reach
2 to 16 times, or less than 1 where bf16 is emulated. Both limits are far from all of these: noise does not decide.
"""


def choose_dtype(speeds: Mapping[str, Mapping[str, float]], kinds: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the dtype that all families compute well in, and the reason; None where they have none in common.

    `speeds` are FLOP/s of large products by family and dtype (those that it has), `kinds` the families' kinds ("cpu",
    "cuda", ...). bf16 is taken where it is worthwhile on every family, since all of them train in the same.
    """
    common = [dtype for dtype in TRAINED_DTYPES if all(of.get(dtype) for of in speeds.values())]
    if len(common) < len(TRAINED_DTYPES):
        names = ", ".join(speeds)
        return (common[0], f"{common[0]}: the only one that {names} can train in") if common else None
    needed = {name: HALF_PAYS_ON_CPUS if kinds[name] == "cpu" else HALF_PAYS for name in speeds}
    ratios = {name: of["bf16"] / of["fp32"] for name, of in speeds.items()}
    least = min(speeds, key=lambda name: ratios[name] / needed[name])
    resolved = "bf16" if ratios[least] >= needed[least] else "fp32"
    figures = ", ".join(f"{of['bf16'] / of['fp32']:.2g} times as fast on {name}" for name, of in speeds.items())
    return resolved, f"{resolved}: products in bf16 are {figures}; bf16 pays from {needed[least]:g} times on {least}"
