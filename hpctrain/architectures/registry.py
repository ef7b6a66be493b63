"""The families that there are: every module of this folder that describes one."""

import importlib
import pkgutil
from collections.abc import Mapping
from functools import lru_cache
from types import ModuleType
from typing import Any

import hpctrain.architectures as folder

OTHERS = {"description", "huggingface", "registry"}


@lru_cache
def families() -> dict[str, ModuleType]:
    """Return the modules of all families by name, which is what a job calls its architecture."""
    names = sorted(module.name for module in pkgutil.iter_modules(folder.__path__) if module.name not in OTHERS)
    return {name: importlib.import_module(f"{folder.__name__}.{name}") for name in names}


@lru_cache
def presets() -> dict[str, dict]:
    """Return the published shapes of all families by name; each is the keys of a job's `[model]`."""
    return {
        name: {"architecture": family, **sizes}
        for family, module in families().items()
        for name, sizes in module.PRESETS.items()
    }


OPTIONAL: dict[str, Any] = {
    "num_kv_heads": None,
    "head_size": None,
    "ffn_size": None,
    "rope_base": 10000.0,
    "rope_scaling": None,
    "rope_local_base": None,
    "window": None,
    "global_every": None,
    "score_divisor": None,
    "score_cap": None,
    "logit_cap": None,
    "num_experts": None,
    "experts_per_token": None,
    "expert_size": None,
    "shared_experts": 0,
    "dense_layers": 0,
    "expert_groups": 1,
    "groups_per_token": 1,
    "normalise_scores": True,
    "score_scale": 1.0,
}
"""Keys of `[model]` that only some families have, with their default values."""
EVERYTHING = {
    "num_layers": 3,
    "hidden_size": 8,
    "num_heads": 2,
    **{key: 2 for key in OPTIONAL if key != "rope_scaling"},
}
"""A small shape that sets every key of `OPTIONAL` but rope_scaling."""


class _NotedShape:
    """A shape that notes which of its keys a family reads."""

    def __init__(self, values: Mapping[str, Any]):
        self._values = {"max_positions": 8, "tie_head": False, "norm_epsilon": 1e-5, **OPTIONAL, **values}
        self.read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return None if name == "rope_scaling" else self._values[name]  # it may be a file's, not checked yet


def keys_read(family: str, values: Mapping[str, Any]) -> set[str]:
    """Return the keys of `[model]` that a family reads for these values."""
    shape = _NotedShape(values)
    families()[family].describe(shape)
    return shape.read


def unread_keys(values: Mapping[str, Any]) -> list[str]:
    """Return the keys of a `[model]` that are set but have no effect, given its family and its other keys."""
    given = [key for key, default in OPTIONAL.items() if values.get(key) not in (None, default)]
    read = keys_read(values["architecture"], values) if given else set()
    return [key for key in given if key not in read]


def describe_unread(family: str, key: str) -> str:
    """Say why a key of `[model]` has no effect on a family."""
    having = [name for name in families() if key in keys_read(name, EVERYTHING)]
    if family in having:
        return f"has no effect on a {family} without window; set model.window too, or remove it"
    return f"has no effect on a {family}; remove it, or take a family that has it: {', '.join(having)}"
