"""When weights and gradients are there: one rank of several, whose others are pretended."""

from collections import Counter, deque
from itertools import groupby, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.comm.groups.group import Group
from hpctrain.config.job import Model
from hpctrain.model.operators.running import add_part
from hpctrain.model.parallel.axes import Axes
from hpctrain.model.storage.store import Store
from hpctrain.plan.holdings import holding_of
from hpctrain.plan.schedule import forward_only, layers_in_order, one_f_one_b
from hpctrain.plan.tiling import Plan, even_plan
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval, cut_evenly
from hpctrain.sharding.items import layers
from hpctrain.sharding.parameters import item_parameters

MODEL = Model(architecture="gpt2", num_layers=3, hidden_size=8, num_heads=4, vocab_size=16, tie_head=True)
LAYERS = layers(Interval(0, MODEL.num_items))
ALONE = Group([0])


class PretendedAxis:
    """Rank 0 of two, of which the other brings ones to all that is gathered, and zeros to all that is summed."""

    rank, size = 0, 2

    def __init__(self, is_overlapped: bool):
        self.is_overlapped = is_overlapped
        self.in_flight: deque[PretendedWork] = deque()
        self.started: Counter[str] = Counter()

    def start_all_gather(self, tensor, cuts=None):
        theirs = (cuts or cut_evenly(tensor.numel(), 2))[1]
        return self._start("all_gather", lambda: tensor[slice(*theirs)].fill_(1.0))

    def start_reduce_scatter(self, tensor, out, cuts=None):
        own = (cuts or cut_evenly(tensor.numel(), 2))[0]
        return self._start("reduce_scatter", lambda: out.copy_(tensor[slice(*own)]))

    def _start(self, name, move):
        work = PretendedWork(self, move)
        self.started[name] += 1
        self.in_flight.append(work)
        if not self.is_overlapped:
            work.wait()
        return work

    def barrier(self):
        assert not self.in_flight

    def allocate_common(self, numel, dtype, device):
        return None


class PretendedWork:
    """Is done when it is waited for, after all that was started before it."""

    def __init__(self, axis: PretendedAxis, move):
        self._axis, self._move = axis, move

    def wait(self):
        while self in self._axis.in_flight:
            self._axis.in_flight.popleft()._move()


def store_of(plan: Plan, z: PretendedAxis, holders: PretendedAxis, keep: int = 0) -> Store:
    shards = holding_of(MODEL, plan, 0)
    axes = Axes(ALONE, ALONE, z if plan.tile_of(0).tensor.z > 1 else ALONE)
    groups = [holders if len(shard_group.ranks) > 1 else ALONE for shard_group in shards.shard_groups]
    return Store(groups, shards, axes, torch.float32, torch.device("cpu"), items_of(LAYERS[:keep]))


def items_of(some) -> list[int]:
    return [item for layer in some for item in range(*layer)]


def layers_from(order, i: int, concurrent: int) -> list[Interval]:
    """Return the layer at a place of an order and, where gathers are overlapped, so many others that come next."""
    return list(dict.fromkeys(order[i:]))[: 1 + concurrent]


def whole_units(store: Store) -> set:
    """Return the units whose whole weights have memory."""
    return {unit for unit in store.units if unit.is_gathered or unit.gathering is not None}


def units_of(store: Store, some) -> set:
    return {unit for item in items_of(some) for unit in store.units_of(item)}


orders = st.lists(st.sampled_from([LAYERS, LAYERS[::-1]]), min_size=1, max_size=6).map(
    lambda passes: [layer for one in passes for layer in one]
)


@given(order=orders, concurrent=st.booleans(), keep=st.integers(0, len(LAYERS)))
def test_weights_are_there_when_their_layer_computes_and_few_others_are(order, concurrent, keep):
    z = PretendedAxis(concurrent)
    store = store_of(even_plan(MODEL.num_items, TensorGrid(z=2), 1, 1, 1, 2), z, ALONE, keep)
    handles = {
        layer: [
            weight
            for item in range(*layer)
            for weight in store.weights(item, [p.name for u in store.units_of(item) for p in u.layout.unit.parameters])
        ]
        for layer in LAYERS
    }
    kept = units_of(store, LAYERS[:keep])
    store.traffic.expect(order)
    for i, layer in enumerate(order):
        store.traffic.gather(layer)
        for weight in handles[layer]:
            assert weight.data.shape and set(weight.data.flatten().tolist()) <= {0.0, 1.0}
        near = layers_from(order, i, concurrent)
        assert whole_units(store) == kept & units_of(store, [*order[:i], *near]) | units_of(store, near)
        assert len(z.in_flight) <= 2 * 2 * concurrent, "of the two branches of two blocks"
        store.traffic.release(layer)
    assert not z.in_flight and whole_units(store) <= kept
    turns = [layer for layer, _ in groupby(order)]
    expected = 0
    for unit in store.units:
        uses = [i for i, layer in enumerate(turns) if unit in units_of(store, [layer])]
        again = sum(b - a > 1 + concurrent for a, b in pairwise(uses))
        expected += bool(uses) + (0 if unit in kept else again)
    assert z.started["all_gather"] == expected
    store.traffic.forget()
    assert not whole_units(store)


@given(order=orders, beside_z=st.booleans(), beside_data=st.booleans(), with_z=st.booleans())
def test_shards_over_z_and_over_holders_are_gathered_one_after_the_other(order, beside_z, beside_data, with_z):
    z, holders = PretendedAxis(beside_z), PretendedAxis(beside_data)
    plan = even_plan(MODEL.num_items, TensorGrid(z=2 if with_z else 1), 1, 2, 1, 2, zero=3)
    store = store_of(plan, z, holders)
    store.traffic.expect(order)
    operations = (beside_z and with_z) + beside_data
    for i, layer in enumerate(order):
        store.traffic.gather(layer)
        units = [unit for unit in units_of(store, [layer]) if not unit.stays]
        assert all(unit.is_gathered for unit in units)
        assert whole_units(store) <= units_of(store, layers_from(order, i, operations))
        store.traffic.release(layer)
    assert not z.in_flight and not holders.in_flight
    assert holders.started["all_gather"] <= len(items_of(order))


@given(
    microbatches=st.integers(1, 3),
    concurrent=st.tuples(st.booleans(), st.booleans()),
    layout=st.sampled_from([(2, 1, 1), (2, 2, 2), (1, 2, 2), (1, 2, 3), (2, 2, 3), (1, 1, 1)]),
)
def test_gradients_are_added_in_the_order_of_microbatches_and_reported_when_they_are(microbatches, concurrent, layout):
    """Each pass adds another number to all gradients; who is notified of an item sees them all in its shards.

    Those of a tied head's table are made by two items; what no item makes is zero.
    """
    (z_size, data, zero), (z, holders) = layout, (PretendedAxis(b) for b in concurrent)
    store = store_of(even_plan(MODEL.num_items, TensorGrid(z=z_size), 1, data, 1, 2, zero=zero), z, holders)
    summary = []
    names = {item: [p.name for p in item_parameters(MODEL, item)] for item in items_of(LAYERS)}
    handles = {layer: [w for item in range(*layer) for w in store.weights(item, names[item])] for layer in LAYERS}

    def passed(item):
        summary.append(item)
        for unit in store.units_of(item):
            if unit.scatters and len(unit.layout.unit.items) == 1:
                shard = unit._sharded.own_grads() if unit._sharded else unit._grad_shard
                assert set(shard.tolist()) == {sum(10.0**m for m in range(microbatches))}

    for m in range(microbatches):
        for layer in reversed(LAYERS):
            store.traffic.gather(layer)
            store.traffic.begin_backward(layer)
            for unit in units_of(store, [layer]):
                if unit.scatters:
                    unit._whole_grad.fill_(torch.nan)
            for weight in handles[layer]:
                if weight.grad is not None:
                    for half in (0.5, 0.5):
                        weight.accumulate(add_part, torch.full_like(weight.grad, half * 10.0**m))
            store.traffic.end_backward(layer, passed if m == microbatches - 1 else None)
            assert len(store.traffic.scattering) <= 2 * any(concurrent)
            store.traffic.release(layer)
    store.traffic.collect()
    assert summary == items_of(LAYERS)[::-1]
    assert not z.in_flight and not holders.in_flight


def test_what_is_not_expected_is_refused():
    store = store_of(even_plan(MODEL.num_items, TensorGrid(z=2), 1, 1, 1, 2), PretendedAxis(True), ALONE)
    store.traffic.expect(LAYERS)
    with pytest.raises(AssertionError, match=r"items \[1, 3\] compute where \[0, 1\] were expected"):
        store.traffic.gather(LAYERS[1])


def test_the_layers_of_a_step_are_those_of_its_instructions():
    plan = even_plan(MODEL.num_items, TensorGrid(), 2, 1, 2, 4)
    first, last = plan.tiles
    a, b, c, d, e = LAYERS
    assert list(layers_in_order(one_f_one_b(plan, last), [last])) == [c, d, e, e, d, c] * 2
    assert list(layers_in_order(one_f_one_b(plan, first), [first])) == [a, b, a, b, b, a, b, a]
    assert list(layers_in_order(forward_only(plan, last), [last])) == [c, d, e] * 2
