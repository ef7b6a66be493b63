"""The section `[kernels]` of a job: which kernels compute, where several compute the same."""

from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import Field

from hpctrain.config.clusters.cluster import Cluster, Family
from hpctrain.config.tables import AUTO, Table

AttentionKernel = Literal["torch", "flash", "flash3", "flash4", "cudnn", "efficient", "math", "flex"]


class KernelChoice(Table):
    """The kernels that compute, where several compute the same with other last bits."""

    fused: Annotated[bool | None, AUTO] = None
    """Whether norms, rotary positions, gated activations and the loss are fused kernels (torch.compile); auto: on
    devices where a trial compiles and gives the right numbers, never on CPUs."""
    fused_by_family: dict[str, bool] = Field(default_factory=dict)
    """The same for some families, such as `{v100 = false}`; all others have `kernels.fused`."""

    attention: Annotated[AttentionKernel | None, AUTO] = None
    """Which kernel computes attention where scores have no cap. flash, flash3, cudnn, efficient and math are those of
    torch's function, torch is its own choice, flash4 is the package flash-attn-4, flex is FlexAttention. auto: on a
    Hopper, flash4 or flex where a trial passes, or cudnn in any order of sums; else torch. One that a rank does not
    have for the job's attention is refused at the start."""
    attention_by_family: dict[str, AttentionKernel] = Field(default_factory=dict)
    """The same for some families; all others have `kernels.attention`."""
    deterministic: bool = True
    """Whether sums on devices have one order, so that the same run has the same bits. false: torch may use kernels that
    are faster in some cases, such as all of cuDNN's for attention; `benchmarks.gpu` measures the price."""

    logits_mib: Annotated[Annotated[int, Field(gt=0)] | None, AUTO] = None
    """MiB of logits, as if in fp32, that may be there at once: the head goes through its tokens in parts. auto: 256
    where any rank is a CPU, else a ninth of the smallest device's memory, at most 8192."""

    def fused_of(self, family: str) -> bool | None:
        """Return whether the kernels of a family are fused; None where that is not resolved yet."""
        return self.fused_by_family.get(family, self.fused)

    def attention_of(self, family: str) -> str:
        """Return the kernel of a family; torch's own choice where that is not resolved yet."""
        return self.attention_by_family.get(family) or self.attention or "torch"

    @property
    def is_fused(self) -> bool:
        """Say whether the kernels of all families are fused, as far as it is known."""
        return bool(self.fused) and all(self.fused_by_family.values())

    def assumed(self, cluster: Cluster) -> Self:
        """Return the choice for a prediction, before any rank has tried.

        auto counts as fused where no family of the cluster is of CPUs.
        """
        is_open = self.fused is None and all(family.kind != "cpu" for family in cluster.families.values())
        known = self.with_logits(cluster.families.values())
        return known.model_copy(update={"fused": True}) if is_open else known

    def with_logits(self, families: Iterable[Family]) -> Self:
        """Return the choice with a value for `logits_mib`, where ranks are of these families."""
        if self.logits_mib is not None:
            return self
        shares = [0 if family.kind == "cpu" else family.memory_bytes // LOGITS_SHARE for family in families]
        num_bytes = max(min(shares, default=0), LOGITS_BYTES)
        return self.model_copy(update={"logits_mib": min(num_bytes, MOST_LOGITS_BYTES) >> 20})

    @property
    def logits_bytes(self) -> int:
        return LOGITS_BYTES if self.logits_mib is None else self.logits_mib << 20


LOGITS_BYTES, MOST_LOGITS_BYTES, LOGITS_SHARE = 256 << 20, 8 << 30, 9
"""Of logits, as if in fp32, that may be there at once, on CPUs and on devices, of whose memory they are a share. What
is computed at once is computed once: 16,384 tokens of 128 thousand ids on a device of 80 GB. In half precision they are
half as large."""
TOKEN_MULTIPLE = 256
"""Parts of a batch have a multiple of so many tokens, where they have more: kernels for products like such sizes."""


def tokens_at_once(num_tokens: int, columns: int, logits_bytes: int) -> int:
    """Return how many tokens have logits of so many columns at once: as many on all ranks of a grid."""
    count = max(1, logits_bytes // (4 * columns))
    return min(num_tokens, count - count % TOKEN_MULTIPLE if count > TOKEN_MULTIPLE else count)
