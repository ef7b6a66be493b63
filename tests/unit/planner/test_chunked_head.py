"""Where there are many logits, the planner prices the head as the engine computes it: some tokens at a time."""

from dataclasses import replace

import pytest

from hpctrain.config.clusters.cluster import Family
from hpctrain.config.kernels import LOGITS_BYTES, KernelChoice, tokens_at_once
from hpctrain.planner.prediction.activations import layer_computing, layer_kept
from hpctrain.planner.prices.cost import layer_cost
from hpctrain.planner.prices.setup import Setup
from hpctrain.sharding.grid import TensorGrid
from tests.unit.planner.test_predict import CLUSTER, SETUP

POSITIONS = 2048
FEW, MANY = 1024, 128 * 1024
"""Ids: all logits of a row at once, and 512 tokens at a time."""
ALONE, CUT = TensorGrid(), TensorGrid(y=2)


def setup_of(ids: int, dtype: str = "bf16") -> Setup:
    model = SETUP.model.model_copy(update={"vocab_size": ids, "max_positions": POSITIONS})
    return replace(SETUP, model=model, positions=POSITIONS, dtype=dtype)


def head_products(setup: Setup, grid: TensorGrid) -> tuple[int, int]:
    """Return how many products of the head's size there are forward, and backward."""
    cost = layer_cost(setup, grid, setup.head, 1, "none")
    return len(cost.forward.products), len(cost.backward_input.products) + len(cost.backward_weight.products)


@pytest.mark.parametrize("grid", [ALONE, CUT], ids=str)
def test_what_goes_in_chunks_has_all_products_in_its_backward_pass(grid):
    few, many = (tokens_at_once(POSITIONS, ids // grid.y, LOGITS_BYTES) for ids in (FEW, MANY))
    assert few == POSITIONS > many
    assert head_products(setup_of(FEW), grid) == (1, 2)
    assert head_products(setup_of(MANY), grid) == (0, 3)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_memory_has_a_chunk_of_logits_and_keeps_none_and_no_sums(dtype):
    few, many = setup_of(FEW, dtype), setup_of(MANY, dtype)
    logits = POSITIONS * FEW * few.item_bytes
    assert (
        layer_kept(few, ALONE, few.head, "none") - layer_kept(many, ALONE, many.head, "none") == logits + 4 * POSITIONS
    )
    computing = layer_computing(many, ALONE, many.head, "none")
    assert LOGITS_BYTES <= computing < 2.5 * LOGITS_BYTES < POSITIONS * MANY * 4


def test_devices_have_larger_parts_than_cpus():
    """512 tokens of 128 thousand ids with any CPU, 16,384 where all ranks are devices of 80 GB or more."""

    def family(kind: str, gigabytes: int) -> Family:
        return CLUSTER.families["fast"].model_copy(update={"kind": kind, "memory_bytes": gigabytes * 10**9})

    def tokens_of(*families: Family, asked: int | None = None) -> int:
        choice = KernelChoice(logits_mib=asked).with_logits(families)
        return tokens_at_once(16384, MANY, choice.logits_bytes)

    cpu, small, large = family("cpu", 256), family("cuda", 32), family("cuda", 80)
    assert [tokens_of(cpu), tokens_of(large, cpu), tokens_of(large, small)] == [512, 512, 6656]
    assert tokens_of(large) == tokens_of(family("cuda", 141)) == 16384, "all, so that no product is computed twice"
    assert tokens_of(large, asked=512) == 1024, "as the job says"
    assert KernelChoice().logits_bytes == LOGITS_BYTES, "of runs from before there was a choice"


def test_memory_has_one_chunk_for_all_rows_of_a_pass():
    """With room for the logits of two rows, four rows go in chunks, of half a row each."""
    setup = replace(setup_of(MANY), logits_bytes=4 * MANY * POSITIONS * 2)
    assert (
        layer_kept(setup, ALONE, setup.head, "none", 2)
        > POSITIONS * MANY
        > layer_kept(setup, ALONE, setup.head, "none", 4)
    )
    whole, chunked = (rows * layer_computing(setup, ALONE, setup.head, "none", rows) for rows in (2, 4))
    assert chunked == pytest.approx(whole, rel=0.5), "as many logits are there at once"
