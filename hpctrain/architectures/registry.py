"""The families that there are: every module of this folder that describes one."""

import importlib
import pkgutil
from functools import lru_cache
from types import ModuleType

import hpctrain.architectures as folder

OTHERS = {"description", "huggingface", "registry"}


@lru_cache
def families() -> dict[str, ModuleType]:
    """Return the modules of all families by name, which is what a job calls its architecture."""
    names = sorted(module.name for module in pkgutil.iter_modules(folder.__path__) if module.name not in OTHERS)
    return {name: importlib.import_module(f"{folder.__name__}.{name}") for name in names}


@lru_cache
def presets() -> dict[str, dict]:
    """Return the published shapes of all families by name: keys of a job's `[model]`."""
    return {
        name: {"architecture": family, **sizes}
        for family, module in families().items()
        for name, sizes in module.PRESETS.items()
    }
