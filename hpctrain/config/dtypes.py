"""Which dtypes a job trains in where it leaves that open. Pure."""

from collections.abc import Mapping

TRAINED_DTYPES = ("bf16", "fp16", "fp32")
HALF_PAYS_ON_CPUS, HALF_PAYS = 6.0, 1.5
"""By how much large products must be faster in half precision than in fp32 for it to be taken.

CPUs without units for half precision reach 0.01 to 2.2 times the speed of fp32. Those with AVX512-BF16 reach 4.3 times,
but steps of small models gain 1.1 to 1.7 times alone: they keep fp32. Those with matrix units (AMX) reach 8 times and
more. GPUs reach 2 to 16 times, or less than 1 where bf16 is emulated. Limits are far from all of these: noise does not
decide.
"""


def choose_dtypes(
    speeds: Mapping[str, Mapping[str, float]], kinds: Mapping[str, str]
) -> tuple[dict[str, str], str] | None:
    """Return the dtype of each family, and the reason; None where a family has no speed in any that can be trained in.

    `speeds` are FLOP/s of large products by family and dtype (those that it has), `kinds` the families' kinds ("cpu",
    "cuda", ...). Each family takes bf16, or else fp16, where that is worthwhile on it; a family that gains nothing does
    not keep the others from it.
    """
    result, reasons = {}, []
    for name, of in speeds.items():
        known = [dtype for dtype in TRAINED_DTYPES if of.get(dtype)]
        if not known:
            return None
        needed = HALF_PAYS_ON_CPUS if kinds[name] == "cpu" else HALF_PAYS
        ratios = {dtype: of[dtype] / of["fp32"] for dtype in known[:-1]} if of.get("fp32") else {}
        paying = [dtype for dtype, ratio in ratios.items() if ratio >= needed]
        result[name] = paying[0] if paying else known[-1]
        if len(known) == 1:
            reasons.append(f"{name}: {known[0]}, the only one that it has")
        else:
            tried = paying[:1] or list(ratios)[:1]
            figures = "".join(f", {dtype} is {ratios[dtype]:.2g} times as fast as fp32" for dtype in tried)
            reasons.append(f"{name}: {result[name]}{figures} and pays from {needed:g} times")
    return result, "; ".join(reasons)
