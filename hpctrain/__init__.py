"""hpctrain: train one large language model on all the accelerators a site owns, as if they were one machine.

The public API is `PUBLIC`: everything else may change without notice. `from hpctrain import load_job` works. A name is
imported from its module when it is first used, so that `import hpctrain` costs nothing.
"""

import importlib

__version__ = "0.1.0"

PUBLIC = {
    "find_plan": "hpctrain.jobs.library",
    "PlanResult": "hpctrain.jobs.library",
    "load_job": "hpctrain.config.job",
    "Job": "hpctrain.config.job",
    "locate_cluster": "hpctrain.config.clusters.cluster_file",
    "load_cluster": "hpctrain.config.clusters.cluster_file",
    "Cluster": "hpctrain.config.clusters.cluster",
    "HpctrainError": "hpctrain.config.errors",
    "Plan": "hpctrain.plan.tiling",
    "Tile": "hpctrain.plan.tiling",
    "TensorGrid": "hpctrain.sharding.grid",
    "even_plan": "hpctrain.plan.tiling",
    "load_plan": "hpctrain.plan.file",
    "dump_plan": "hpctrain.plan.file",
    "draw_plan": "hpctrain.plan.draw",
    "Limits": "hpctrain.planner.search.search",
    "Space": "hpctrain.planner.search.space",
    "search_best": "hpctrain.planner.choose",
    "Setup": "hpctrain.planner.prices.setup",
    "predict": "hpctrain.planner.prediction.predictor",
}
"""Each public name and the module that defines it."""
__all__ = [*PUBLIC]


def __getattr__(name: str):
    if name in PUBLIC:
        return getattr(importlib.import_module(PUBLIC[name]), name)
    raise AttributeError(f"module 'hpctrain' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*globals(), *PUBLIC])
