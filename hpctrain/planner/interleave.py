"""Interleaved pipelines: layouts of which each rank has several tiles, of those that a search has scored. Pure.

With v virtual stages a rank has v tiles, as many tiles apart as there are stages (Narayanan et al. 2021, arXiv
2104.04473). The bubble is about the v-th part. There are v times as many messages, and the first of p stages keeps the
activations of p + (p - 1) / v microbatches instead of p.

That pays where the bubble is long. So a search scores plans of one tile a rank first, and then those of them with
several that would be the fastest with shorter bubbles.
"""

from collections.abc import Sequence

from hpctrain.planner.cut import SearchLayout
from hpctrain.planner.score import Scorer
from hpctrain.planner.space import interleaved_shapes
from hpctrain.planner.timing import CLOSED_FORM_ERROR

INTERLEAVED = 30
"""How many layouts are scored with several virtual stages."""


def interleave(
    scorer: Scorer, layouts: Sequence[SearchLayout], best_seconds: float, count: int | None = INTERLEAVED
) -> tuple[list[SearchLayout], int]:
    """Return layouts with several virtual stages, the fastest first, and how many were not scored so that could be.

    Those `count` of the given layouts are scored so that would be the fastest with the shortest bubbles they can have,
    and faster than `best_seconds`; None: all.
    """
    most, num_blocks = scorer.space.most_virtual_stages, scorer.costs.setup.model.num_layers
    every = ((layout, interleaved_shapes(layout.shape, num_blocks, most)) for layout in layouts)
    every = [(_least_seconds(layout, shapes[-1].virtual_stages), shapes) for layout, shapes in every if shapes]
    every.sort(key=lambda each: each[0])
    limit = best_seconds * (1 + CLOSED_FORM_ERROR) if count is not None else float("inf")
    promising = [shapes for seconds, shapes in every[:count] if seconds < limit]
    result = (scorer.score(shape) for shapes in promising for shape in shapes)
    return sorted(filter(None, result), key=lambda layout: layout.seconds), len(every) - len(promising)


def _least_seconds(layout: SearchLayout, virtual_stages: int) -> float:
    """Return about what a step would take with bubbles that are so many times shorter."""
    bubbles = (sum(placed.forward + placed.backward for placed in stages[1:]) for stages in layout.stages)
    return layout.seconds - min(bubbles) * (1 - 1 / virtual_stages)
