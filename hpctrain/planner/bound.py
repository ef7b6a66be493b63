"""What no plan of the search's space can take less than. Pure.

A time is refuted if no arrangement of pools, with no number of microbatches, can do all blocks in it; the bound is the
longest time that was refuted. In a pipeline of 1F1B that ends after E, a stage with M microbatches of T seconds each
neither starts before the first one has passed the stages before it, nor ends before the last one has come back:

    (M - late) T + sum over the stages before of (1 - late) T  <=  E

where `late` is the share of a stage's time after it has sent the gradient, 0 of the first one. These are the
constraints of a linear program for the most blocks that stages can do; any prices of them give an upper bound
(duality), and those of stages that are all full are found backwards, from the loss to the first stage, pool by pool.
Beside that a stage does whole blocks, no more than it has memory for with the activations that its depth makes it keep,
without recomputing or with, the last one also a row at a time; replicas exchange what they share. Messages are not
counted. Of pipelines side by side each is given as many rows as it can do in the time; a time is refuted if these are
too few. Ways of the last stages that leave more than the pools before them can do at their fastest are dropped. Of many
pools on many devices ways are told apart roughly, to the better side.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hpctrain.parameters import count_parameters
from hpctrain.plan import TensorGrid
from hpctrain.planner.cost import update_seconds
from hpctrain.planner.options import FEW_DEVICES, Group, Options, Rate, options_of, rates_of
from hpctrain.planner.space import Pipelines, Space, arrangements
from hpctrain.planner.stages import StageCosts

CERTAIN_SHARE = 0.9
"""Of updates: cuts are rounded."""
STEPS, HALVINGS = 4, 4
"""From what is certain at once to the best plan by so many steps, the last of which is halved so often."""
ROW_PARTS = 64
"""How finely the rows that a pipeline can do are searched for: to one of so many parts of all."""
ROUNDING = 1e-9
ROUGHLY, ROUGHLY_OF_MANY, FEW_POOLS = 5e-4, 4e-3, 2
"""States are told apart by so much of all; more coarsely where there are more pools, each of which multiplies them."""
FEWEST_BESIDE = 2
"""Pipelines side by side, of which more exchange more."""
MOST_WORK = 40_000_000
"""How many stages of options beside states are reckoned with, before the bound is left as it is."""


@dataclass(frozen=True)
class _States:
    """The last stages of a pipeline, in ways none of which is worse than another in all respects."""

    depth: np.ndarray
    """How many stages they are."""
    per_second: np.ndarray
    """Blocks for each second that the pipeline has, by prices of its constraints."""
    more: np.ndarray
    """Blocks beside, which cost less than the prices."""
    whole: np.ndarray
    """Whole blocks, if no stage waited."""

    def only(self, which: np.ndarray) -> "_States":
        return _States(*(array[which] for array in vars(self).values()))

    def doing(self, blocks: float, seconds: float) -> "_States":
        """Return those that may do so many blocks in so many seconds."""
        most = np.minimum(self.per_second * seconds + self.more, self.whole)
        return self.only(np.flatnonzero(most * (1 + ROUNDING) >= blocks))

    def undominated(self, num_blocks: int, roughly: float) -> "_States":
        """Return those that are not worse than another one with as many stages, their figures rounded up a little."""
        rate = np.exp(np.ceil(np.log(self.per_second) / roughly) * roughly)
        more = np.ceil(self.more / (num_blocks * roughly)) * num_blocks * roughly
        whole = np.minimum(self.whole, num_blocks)
        order = np.lexsort((-whole, -more, -rate, self.depth))
        figures = np.stack([self.depth, rate, more, whole], axis=1)[order]
        is_new = np.ones(len(order), dtype=bool)
        is_new[1:] = np.any(figures[1:, :3] != figures[:-1, :3], axis=1)
        kept: list[tuple[float, ...]] = []
        last, most = -1.0, []  # of those with as many stages, which come by falling rates, the most `more` by `whole`
        for depth, speed, beside, blocks in figures[is_new].tolist():
            if depth != last:
                last, most = depth, [-math.inf] * (num_blocks + 1)
            place = int(blocks)
            if most[place] < beside:
                kept.append((depth, speed, beside, blocks))
                while place >= 0 and most[place] < beside:
                    most[place] = beside
                    place -= 1
        found = np.array(kept).reshape(-1, 4)
        return _States(found[:, 0].astype(int), *found.T[1:])


def least_seconds(
    costs: StageCosts,
    global_batch: int,
    space: Space,
    best_seconds: float,
    is_over: Callable[[], bool] = lambda: False,
) -> float:
    """Return the bound, at the most `best_seconds`: those of a plan that is known. `is_over` says that time is."""
    return _Bound(costs, global_batch, space, is_over).least_seconds(best_seconds)


class _SpentError(Exception):
    """There was as much work as there may be."""


class _Bound:
    def __init__(self, costs: StageCosts, global_batch: int, space: Space, is_over: Callable[[], bool]):
        self._costs, self._space, self._batch, self._is_over = costs, space, global_batch, is_over
        setup = costs.setup
        parameters = count_parameters(setup.model)
        updated = sum(pool.num_devices / update_seconds(setup, pool.device, parameters) for pool in costs.pools)
        self._at_end = CERTAIN_SHARE / updated + costs.agree_seconds + setup.stack.step_seconds
        self._num_blocks = setup.model.num_layers
        every = list(arrangements(len(costs.pools)))
        self._in_a_row = [pipelines[0] for pipelines in every if len(pipelines) == 1]
        self._beside = [pipelines for pipelines in every if len(pipelines) > 1]
        self._options: dict[tuple, Options] = {}
        self._found_rates: dict[tuple[int, int], dict[TensorGrid, Rate]] = {}
        self._is_large = costs.cluster.num_devices > FEW_DEVICES
        self._longest = math.inf
        self._work = 0

    def least_seconds(self, best_seconds: float) -> float:
        counts = self._space.microbatch_counts(self._batch)
        quick = {m: self._quick(m) for m in counts}
        self._longest = best_seconds
        low = min(quick.values())
        if low >= best_seconds:
            return best_seconds
        left = sorted((m for m in counts if quick[m] < best_seconds), key=quick.get)

        def is_refuted(seconds: float) -> bool:
            """What was possible in a longer time comes first: it tells the soonest."""
            for place, m in enumerate(left):
                if quick[m] < seconds and self._is_possible(m, seconds):
                    left.insert(0, left.pop(place))
                    return False
            return True

        # Upwards, for short times leave few options; then by halving, times that are apart by the same factors.
        step, high = (best_seconds / low) ** (1 / STEPS), best_seconds
        try:
            while low * step < high and is_refuted(low * step):
                low *= step
            high = min(high, low * step)
            for _ in range(HALVINGS):
                middle = math.sqrt(low * high)
                low, high = (middle, high) if is_refuted(middle) else (low, middle)
        except _SpentError:
            pass
        return min(low, best_seconds)

    def _quick(self, microbatches: int) -> float:
        """Return what all blocks take if each pool does them by its fastest grid, and no stage waits."""
        rows = self._batch // microbatches
        speed = sum(self._rows_per_second(number, rows) for number in range(len(self._costs.pools)))
        return self._batch * self._num_blocks / speed + self._at_end

    def _rows_per_second(self, number: int, rows: int) -> float:
        """Return how many rows all devices of a pool take through a block in a second, at the most."""
        pool = self._costs.pools[number]
        rates = self._rates(number, rows).items()
        return max(rate.block * grid.z * len(pool.slots(grid.size)) for grid, rate in rates)

    def _rates(self, number: int, rows: int) -> dict[TensorGrid, Rate]:
        key = number, (rows - 1).bit_length()
        if key not in self._found_rates:
            self._found_rates[key] = rates_of(self._costs, self._space, number, rows)
        return self._found_rates[key]

    def _wanted(self, number: int, row: Sequence[int], group: Group, left: float) -> float:
        """Return how many blocks a pool must do at the least, for the others of its pipeline cannot do more."""
        return self._num_blocks - self._most_blocks([other for other in row if other != number], group, left)

    def _most_blocks(self, numbers: Iterable[int], group: Group, left: float) -> float:
        """Return how many blocks some pools can do of a pipeline's rows, if no stage waits."""
        speed = sum(self._rows_per_second(number, group.rows) for number in numbers)
        return speed * left / (group.microbatches * group.rows)

    def _options_of(self, number: int, row: Sequence[int], group: Group, left: float) -> Options:
        """Return the options by which a pool does what the others of its pipeline cannot."""
        if (number, group) not in self._options:  # for whatever pipelines of as many rows
            longest, every = self._longest - self._at_end, range(len(self._costs.pools))
            wanted, rates = self._wanted(number, every, group, longest), self._rates(number, group.rows)
            self._options[number, group] = options_of(self._costs, self._space, group, number, rates, longest, wanted)
        options = self._options[number, group]
        whole = np.floor(left / (group.microbatches * options.seconds[0]) * (1 + ROUNDING))
        is_enough = options.stages * whole >= self._wanted(number, row, group, left)
        return options.only(np.flatnonzero(is_enough & (whole > 0)))

    # ---- whether a time suffices -------------------------------------------------------------------------------------

    def _is_possible(self, microbatches: int, seconds: float) -> bool:
        rows, left = self._batch // microbatches, seconds - self._at_end
        known: dict[tuple, _States] = {}
        if any(self._does_all(row, Group(microbatches, rows, rows, 1), left, known) for row in self._in_a_row):
            return True
        return any(self._has_rows(pipelines, microbatches, rows, left, known) for pipelines in self._beside)

    def _has_rows(self, pipelines: Pipelines, microbatches: int, all_rows: int, left: float, known: dict) -> bool:
        """Say whether pipelines side by side can do all rows in the time."""
        step = max(1, all_rows // ROW_PARTS)

        def does(row: tuple[int, ...], rows: int) -> bool:
            group = Group(microbatches, rows, all_rows, len(pipelines))
            if self._is_large:  # so that what was found for others is of use
                group = group._replace(rows=max(1, rows - rows % step), num_pipelines=FEWEST_BESIDE)
            return self._does_all(row, group, left, known)

        # As far as their devices go; then by what each must do, for the others cannot do more; then each by itself.
        speeds = [sum(self._rows_per_second(number, all_rows) for number in row) for row in pipelines]
        highest = all_rows - len(pipelines) + 1
        most = [min(highest, math.floor(speed * left / (microbatches * self._num_blocks))) for speed in speeds]
        for i, row in enumerate(pipelines):
            if (wanted := all_rows - sum(most) + most[i]) > most[i] or (wanted > 0 and not does(row, wanted)):
                return False
        for i, row in enumerate(pipelines):
            low, high = max(0, all_rows - sum(most) + most[i]), most[i] + 1
            if low > most[i] or (low > 0 and not does(row, low)):
                return False
            while high - low > step:
                middle = (low + high) // 2
                low, high = (middle, high) if does(row, middle) else (low, middle)
            most[i] = high - 1
        return sum(most) >= all_rows

    def _does_all(self, row: tuple[int, ...], group: Group, left: float, known: dict) -> bool:
        """Say whether a pipeline of these pools may do all blocks of its rows in the time."""
        return len(self._states(row, row, group, left, known).depth) > 0

    def _states(
        self, row: tuple[int, ...], whole_row: tuple[int, ...], group: Group, left: float, known: dict
    ) -> _States:
        """Return what the stages of the pools `row` can be, the last ones of the pipeline `whole_row`."""
        if not row:
            nothing = np.zeros(1)
            return _States(np.zeros(1, dtype=int), nothing, nothing, nothing)
        key = group, row, frozenset(whole_row), row == whole_row
        if key not in known:
            behind = self._states(row[1:], whole_row, group, left, known)
            options = self._options_of(row[0], whole_row, group, left)
            self._work += len(behind.depth) * len(options)
            if self._work > MOST_WORK or self._is_over():
                raise _SpentError
            ends = row == whole_row, len(row) == 1
            found = _before(behind, options, group.microbatches, self._num_blocks, left, ends)
            # Without those that leave more than the pools before them can do; before the first one comes nothing more.
            found = found.doing(self._num_blocks - self._most_blocks(set(whole_row) - set(row), group, left), left)
            is_rough = self._is_large and len(self._costs.pools) > FEW_POOLS
            roughly = ROUGHLY_OF_MANY if is_rough else ROUGHLY
            known[key] = found if row == whole_row else found.undominated(self._num_blocks, roughly)
        return known[key]


class _Worth(NamedTuple):
    """What stages of options are worth, [n, depth]: by how many stages are behind them."""

    price: np.ndarray
    """Of a second of a microbatch, in blocks."""
    more: np.ndarray
    """Blocks beside, which cost less."""
    whole: np.ndarray
    """The most blocks."""
    enough: np.ndarray
    """[n]: up to which depth they have memory for all that time allows, without recomputing."""


def _worth(options: Options, microbatches: int, deepest: int, left: float, is_first: bool, is_last: bool) -> _Worth:
    """Return what stages are worth that have so many seconds `left`.

    `is_first` says that they have the embedding, `is_last` that the last one of them has the head.

    The price is that of a block whose activations are kept, where there is memory for all that time allows; else of one
    that is computed again; of the last stage that of the way by which it does the most.
    """
    most = options.most_blocks(deepest, microbatches)
    # What a stage may take of one microbatch: it computes all of them, and then exchanges.
    seconds, late = options.seconds, options.late[:, None]
    limit = np.full((len(options), deepest), left) / (microbatches - late)
    limit[:, 0] -= is_last * options.head
    # Nothing hides what is exchanged of its first item; the first stage's first block has the embedding beside it.
    ends = options.first_more + is_first * (options.embedding_exchanged + (microbatches - 1) * options.embedding)
    for_blocks = left - ends - np.outer([microbatches * is_last, 0], options.head)  # [(last stage, others), n]
    each = microbatches * seconds + options.exchanged
    alone = np.floor(np.maximum(for_blocks, 0.0).T / each[:, :, None] * (1 + ROUNDING))  # [2, n, (last stage, others)]
    fit = np.floor(np.maximum(limit, 0.0) / seconds[:, :, None] * (1 + ROUNDING))
    fit = np.minimum(np.minimum(fit, most), alone[:, :, np.minimum(np.arange(deepest), 1)])
    is_short = most[0] < np.floor(limit / seconds[0][:, None])  # from some depth on
    price = 1 / np.where(is_short, seconds[1][:, None], seconds[0][:, None])
    more = np.maximum((fit * (1 - price * seconds[:, :, None])).max(axis=0), 0.0)
    whole = fit.max(axis=0)
    if is_last:  # which may also go through its rows in pieces
        times = options.piece_seconds
        alone = for_blocks[0] / (microbatches * times + options.exchanged)
        in_pieces = np.floor(np.maximum(np.minimum(limit[:, 0] / times, alone), 0.0) * (1 + ROUNDING))
        last = np.concatenate([fit[:, :, 0], np.minimum(in_pieces, options.piece_blocks)])
        times = np.concatenate([seconds, times])
        price[:, 0] = 1 / times[last.argmax(axis=0), np.arange(len(options))]
        more[:, 0] = np.maximum((last * (1 - price[:, 0] * times)).max(axis=0), 0.0) - price[:, 0] * options.head
        whole[:, 0] = last.max(axis=0)
    return _Worth(price, more, whole, (~is_short).sum(axis=1))


def _with_stages(
    per_second: np.ndarray, price: np.ndarray, through: np.ndarray, times: np.ndarray | int, count: np.ndarray | int
) -> np.ndarray:
    """Return the blocks for each second with `count` more stages before those that have `per_second`.

    One stage more, by its constraint: ((price of a block) - through * per_second) / times more, where that is more than
    nothing; `times` is how many microbatches long it computes in the time, less what is late.
    """
    full = price / np.maximum(through, 1e-12)
    return np.where(per_second < full, full + (per_second - full) * (1 - through / times) ** count, per_second)


def _before(
    behind: _States,
    options: Options,
    microbatches: int,
    num_blocks: int,
    left: float,
    ends: tuple[bool, bool],
) -> _States:
    """Return the states with the stages of one more pool before those that there are.

    `ends` say whether it is the first one of its pipeline, and the last.
    """
    is_first, is_last = ends
    if not len(behind.depth) or not len(options):
        return behind.only(np.zeros(0, dtype=int))
    stages = options.stages.astype(int)
    deepest = min(num_blocks, int(behind.depth.max() + stages.max()))
    price, *sums, enough = _worth(options, microbatches, deepest, left, False, is_last)
    more, whole = (np.pad(each.cumsum(axis=1), ((0, 0), (1, 0))) for each in sums)
    depth = behind.depth[:, None] + stages
    states, numbers = np.nonzero(depth <= deepest)
    before, after = behind.depth[states], depth[states, numbers]
    through, late = options.through[numbers], options.late[numbers]
    per_second, at = behind.per_second[states], before
    # Of stages that have the same price, up to some depth: the last one, those with memory enough, the others; and the
    # first one, before which nobody waits for a gradient.
    inner = after - is_first
    for stop in (*([1] if is_last else []), enough[numbers], inner):
        stop = np.clip(stop, at, inner)
        own_price = price[numbers, np.minimum(at, deepest - 1)]
        per_second, at = _with_stages(per_second, own_price, through, microbatches - late, stop - at), stop
    found_more = behind.more[states] + more[numbers, inner] - more[numbers, before]
    found_whole = behind.whole[states] + whole[numbers, inner] - whole[numbers, before]
    if is_first:
        first = _worth(options, microbatches, deepest, left, True, is_last)
        own_price = first.price[numbers, inner]
        per_second = _with_stages(per_second, own_price, through / (1 - late), microbatches, 1)
        found_more += first.more[numbers, inner] - own_price * options.embedding[numbers]
        found_whole += first.whole[numbers, inner]
    return _States(after, per_second, found_more, found_whole)
