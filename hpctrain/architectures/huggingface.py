"""Translate a `Description` to and from Hugging Face files: names of parameters, keys of `config.json`. Pure.

Each family has a `HuggingFace` table; what is common is here. A config says more than we can do: what would change the
numbers and is not known here is refused, not ignored.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Keys = dict[str, Any]
"""Of a job's `[model]`, or of a config.json."""

ATTENTION = {f"attention.{part}": f"self_attn.{part}_proj" for part in "qkvo"}
LLAMA_PARTS = ATTENTION | {
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"ffn.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
LLAMA_ENDS = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
LLAMA_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "ffn_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
    "tie_head": "tie_word_embeddings",
    "norm_epsilon": "rms_norm_eps",
    "init_std": "initializer_range",
}
LLAMA3_SCALING = {
    "low_factor": "low_freq_factor",
    "high_factor": "high_freq_factor",
    "original_positions": "original_max_position_embeddings",
}


class UnknownConfigError(ValueError):
    """A config that a family here cannot follow, with what it says."""


@dataclass(frozen=True)
class HuggingFace:
    """A family's names and keys there."""

    model_type: str
    class_name: str
    keys: Mapping[str, str] = field(default_factory=lambda: LLAMA_KEYS)
    """From a key of `[model]` to theirs."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """By key of theirs: what a config means that leaves it out."""
    must_be: Mapping[str, Any] = field(default_factory=dict)
    """By key of theirs: the one value that we can follow."""
    parts: Mapping[str, str] = field(default_factory=lambda: LLAMA_PARTS)
    """From a part of a block to theirs."""
    ends: Mapping[str, str] = field(default_factory=lambda: LLAMA_ENDS)
    """From what is outside of blocks to theirs."""
    blocks: str = "model.layers"
    transposes: bool = False
    """Whether weights of linear layers are stored [in, out]."""
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """From a part of theirs to those of ours that lie side by side in it, along the output features."""
    read_more: Callable[[Keys], Keys] = lambda config: {}
    """Returns the keys of `[model]` that follow from a config by other rules than `keys`."""
    write_more: Callable[[Any], Keys] = lambda model: {}
    """Returns the keys of a config that follow from a model by other rules than `keys`."""

    def model_keys(self, config: Keys) -> Keys:
        """Return the keys of `[model]` that a config says. Raises UnknownConfigError."""
        config = {**self.defaults, **{key: value for key, value in config.items() if value is not None}}
        for key, value in self.must_be.items():
            if config.get(key, value) != value:
                raise UnknownConfigError(f"{key} = {config[key]!r}, and only {value!r} can be followed")
        missing = [theirs for ours, theirs in self.keys.items() if theirs not in config and ours in REQUIRED]
        if missing:
            raise UnknownConfigError(f"has no {', '.join(missing)}")
        known = {ours: config[theirs] for ours, theirs in self.keys.items() if theirs in config}
        return known | self.read_more(config)

    def config(self, model: Any) -> Keys:
        """Return a config.json for a model."""
        known = {theirs: getattr(model, ours) for ours, theirs in self.keys.items()}
        known = {key: value for key, value in known.items() if value is not None}
        head = {"architectures": [self.class_name], "model_type": self.model_type}
        return head | dict(self.must_be) | known | self.write_more(model)

    def their_name(self, name: str) -> str:
        """Return what a parameter of ours is called there, or of what it is a part; see `fused`."""
        stem, kind = name.rsplit(".", 1)
        if not stem.startswith("blocks."):
            return f"{self.ends[stem]}.{kind}"
        _, number, part = stem.split(".", 2)
        of = next((theirs for theirs, ours in self.fused.items() if part in ours), None) or self.parts[part]
        return f"{self.blocks}.{number}.{of}.{kind}"


REQUIRED = {"num_layers", "hidden_size", "num_heads", "vocab_size"}


def read_rope(config: Keys, which: str | None = None) -> Keys:
    """Return `rope_base` and `rope_scaling` of a config, new (`rope_parameters`) or old (`rope_theta`).

    `which` is the kind of layer whose they are, where kinds differ. Raises UnknownConfigError.
    """
    parameters = config.get("rope_parameters") or {}
    if which and which in parameters:
        parameters = parameters[which]
    parameters = {"rope_theta": config.get("rope_theta", 10000.0), **(config.get("rope_scaling") or {}), **parameters}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    keys: Keys = {"rope_base": float(parameters["rope_theta"])}
    if kind in ("linear", "llama3"):
        names = LLAMA3_SCALING if kind == "llama3" else {}
        more = {ours: parameters[theirs] for ours, theirs in names.items() if theirs in parameters}
        keys["rope_scaling"] = {"kind": kind, "factor": float(parameters["factor"]), **more}
    elif kind != "default":
        raise UnknownConfigError(f"rope_type = {kind!r}, and only default, linear and llama3 can be followed")
    return keys


def write_rope(model: Any) -> Keys:
    """Return the keys of a config for rotary positions, as older and newer readers know them."""
    parameters: Keys = {"rope_type": "default"}
    if scaling := model.rope_scaling:
        parameters = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            parameters |= {theirs: getattr(scaling, ours) for ours, theirs in LLAMA3_SCALING.items()}
    keys: Keys = {"rope_theta": model.rope_base, "rope_parameters": parameters | {"rope_theta": model.rope_base}}
    return keys | ({"rope_scaling": parameters} if model.rope_scaling else {})


def read_layer_pattern(config: Keys, every: int) -> Keys:
    """Return `window` and `global_every` of a config with layers of two kinds; by default each `every`-th is global.

    Raises UnknownConfigError where the kinds of layers are in no such order.
    """
    kinds = config.get("layer_types")
    every = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", every))
    if kinds:
        all_local = "full_attention" not in kinds
        every = len(kinds) + 1 if all_local else kinds.index("full_attention") + 1
        expected = ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(len(kinds))]
        if list(kinds) != expected:
            raise UnknownConfigError("layer_types are in no regular order, which cannot be followed")
    return {"window": config["sliding_window"], "global_every": every}


def whole(number: float | None) -> float | int | None:
    """Return a number as configs have it: without a point where it is whole."""
    return int(number) if number is not None and float(number).is_integer() else number


def write_layer_pattern(model: Any) -> Keys:
    """Return the keys of a config for layers of two kinds."""
    local = [block.attention.window is not None for block in model.description.blocks]
    kinds = ["sliding_attention" if each else "full_attention" for each in local]
    return {"sliding_window": model.window, "layer_types": kinds}
