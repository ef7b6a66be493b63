"""Translate a `Description` to and from Hugging Face files: names of parameters, keys of `config.json`. Pure.

Each family has a `HuggingFace` table; what is common is here. A config says more than we can do: a key is followed, is
known to change no number, or is refused by its name. What a config leaves out is what the transformers library takes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hpctrain.architectures.description import (
    expert_size_of,
    head_size_of,
    inner_of,
    kv_heads_of,
    yarn_attention_factor,
)

Keys = dict[str, Any]
"""The keys of a job's `[model]`, or of a config.json."""

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
ORIGINAL = {"original_positions": "original_max_position_embeddings"}
SCALING_KEYS: Mapping[str, Mapping[str, str]] = {
    "linear": {},
    "llama3": {"low_factor": "low_freq_factor", "high_factor": "high_freq_factor"} | ORIGINAL,
    "yarn": {key: key for key in ("beta_fast", "beta_slow", "attention_factor", "truncate")} | ORIGINAL,
}
"""For each kind of `[model.rope_scaling]`, the config.json key of each of its keys but `factor`."""


class UnknownConfigError(ValueError):
    """A config that no family of hpctrain can follow; the message says what in it cannot be followed."""


LLAMA_DEFAULTS: Keys = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": None,
}
"""What most families mean by a config that leaves a key out."""
WITHOUT_EFFECT = {
    *("architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "_name_or_path", "_commit_hash"),
    *("_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "cache_implementation"),
    *("use_cache", "return_dict", "use_return_dict", "output_attentions", "output_hidden_states", "problem_type"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "suppress_tokens"),
    *("id2label", "label2id", "num_labels", "finetuning_task", "task_specific_params", "torchscript", "_num_labels"),
    *("max_length", "min_length", "do_sample", "temperature", "top_k", "top_p", "num_beams", "repetition_penalty"),
    *("attention_dropout", "gradient_checkpointing", "pretraining_tp", "unsloth_version", "unsloth_fixed"),
    *("chunk_size_feed_forward", "is_encoder_decoder", "tokenizer_class", "model_max_length"),
}
"""Keys of a config that change no number of a causal model: names, tokens, dtypes, generation and dropout. hpctrain has
no dropout."""


@dataclass(frozen=True)
class HuggingFace:
    """A family's names of parameters and keys of config.json in Hugging Face files."""

    model_type: str
    class_name: str
    defaults: dict[str, Any]
    """The value of each config.json key that a config leaves out, as the transformers library defines it."""
    keys: Mapping[str, str] = field(default_factory=lambda: LLAMA_KEYS)
    """The config.json key for each key of `[model]`."""
    also_named: Mapping[str, str] = field(default_factory=dict)
    """Other names of keys of config.json in some versions of the library, with the names that are read."""
    nullable: tuple[str, ...] = ("num_key_value_heads", "head_dim")
    """Keys of config.json that may be null, which means the same as None in `[model]`."""
    must_be: dict[str, Any] = field(default_factory=dict)
    """The only value that hpctrain supports, by config.json key."""
    read_by_rule: tuple[str, ...] = ()
    """Keys of config.json that `read_more` reads."""
    without_effect: tuple[str, ...] = ()
    """Keys of config.json that change no number, in addition to those of all families."""
    whole_heads: bool = False
    """Whether the transformers library refuses a hidden size that is no multiple of the number of heads."""
    parts: dict[str, str] = field(default_factory=lambda: LLAMA_PARTS)
    """The Hugging Face name of each part of a block."""
    ends: Mapping[str, str] = field(default_factory=lambda: LLAMA_ENDS)
    """The Hugging Face name of each parameter outside of blocks."""
    blocks: str = "model.layers"
    transposes: bool = False
    """Whether the files store weights of linear layers as [in, out]."""
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """For each fused Hugging Face parameter, the hpctrain parameters in it, one after the other along the output
    features."""
    experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """For each hpctrain parameter that has the rows of all experts, the Hugging Face names of an expert's parts of it,
    one after the other; `{}` stands for the expert's number."""
    packed: Mapping[str, str] = field(default_factory=dict)
    """For each hpctrain parameter that has the rows of all experts, the Hugging Face name of its tensor, [experts, in,
    out] or [experts, out]. Outputs of the first product alternate between gate and up."""
    read_more: Callable[[Keys], Keys] = lambda config: {}
    """Returns the keys of `[model]` that need more than a renaming of config.json keys."""
    write_more: Callable[[Any], Keys] = lambda model: {}
    """Returns the keys of config.json that need more than a renaming of `[model]` keys."""

    def model_keys(self, config: Keys) -> Keys:
        """Return the keys of `[model]` that a config says.

        Raises UnknownConfigError for a key that is not followed, unless it has no effect.
        """
        config = {self.also_named.get(key, key): value for key, value in config.items()}
        followed = {*self.keys.values(), *self.must_be, *self.read_by_rule, *self.defaults}
        harmless = WITHOUT_EFFECT.union(self.without_effect)
        if unknown := [key for key, value in config.items() if key not in followed | harmless and value is not None]:
            values = ", ".join(f"{key} = {config[key]!r:.60}" for key in unknown)
            raise UnknownConfigError(
                f"{values}: not known in a config of {self.model_type}, so nobody can say whether the numbers follow"
                " it; remove the key if they do not"
            )
        config = {**self.defaults, **config}
        for key, value in self.must_be.items():
            given = config.get(key, value)
            if given != value and not (given is None and value is False):
                raise UnknownConfigError(f"{key} = {given!r}, and only {value!r} can be followed")
        if missing := [theirs for ours, theirs in self.keys.items() if config.get(theirs) is None and ours in REQUIRED]:
            raise UnknownConfigError(f"has no {', '.join(missing)}")
        for key in self.keys.values():
            if config.get(key) is None and key not in self.nullable:
                raise UnknownConfigError(f"{key} = null, and a {self.model_type} model needs a value")
        hidden, heads = config[self.keys["hidden_size"]], config[self.keys["num_heads"]]
        are_whole = isinstance(hidden, int) and isinstance(heads, int)  # else the keys of [model] say what is wrong
        if self.whole_heads and are_whole and heads and hidden % heads:
            raise UnknownConfigError(
                f"hidden_size = {hidden} is no multiple of num_attention_heads = {heads}, which the library refuses"
            )
        read = {ours: config[theirs] for ours, theirs in self.keys.items()}
        read |= self.read_more(config)
        return {ours: value for ours, value in read.items() if value is not None}

    def config(self, model: Any) -> Keys:
        """Return a config.json for a model."""
        resolved = {"num_kv_heads": kv_heads_of(model), "head_size": head_size_of(model), "ffn_size": inner_of(model)}
        resolved["expert_size"] = expert_size_of(model)
        known = {theirs: resolved.get(ours, getattr(model, ours)) for ours, theirs in self.keys.items()}
        head = {"architectures": [self.class_name], "model_type": self.model_type}
        return head | dict(self.must_be) | known | self.write_more(model)

    def their_name(self, name: str) -> str:
        """Return the Hugging Face name of one of our parameters, or of the fused parameter that contains it (see
        `fused`)."""
        stem, kind = name.rsplit(".", 1)
        if not stem.startswith("blocks."):
            return f"{self.ends[stem]}.{kind}"
        _, number, part = stem.split(".", 2)
        if named := self.parts.get(f"{part}.{kind}"):
            return f"{self.blocks}.{number}.{named}"
        of = next((theirs for theirs, ours in self.fused.items() if part in ours), None) or self.parts[part]
        return f"{self.blocks}.{number}.{of}.{kind}"


REQUIRED = {"num_layers", "hidden_size", "num_heads", "vocab_size"}
ROPE_KEYS = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)
"""Keys of a config about rotary positions: `rope_parameters`, or the others in older versions."""


def read_rope(config: Keys) -> Keys:
    """Return `rope_base` and `rope_scaling` of a config, by the rules of the transformers library.

    `rope_scaling` comes before `rope_parameters`, whose `rope_theta` comes before that beside it. Raises
    UnknownConfigError.
    """
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind, original = (
        parameters.get("rope_type") or parameters.get("type"),
        config.get("original_max_position_embeddings"),
    )
    if original and kind in ("llama3", "yarn"):
        parameters = parameters | {"original_max_position_embeddings": original}
    base, partial = config.get("rope_theta") or 10000.0, config.get("partial_rotary_factor")
    return rotary_keys(parameters, base, config["max_position_embeddings"], partial)


def rotary_keys(parameters: Keys, base: float, original_positions: int, partial: float | None = None) -> Keys:
    """Return `rope_base` and `rope_scaling` for a table of rotary positions; the other arguments are its defaults.

    Raises UnknownConfigError for an unsupported kind of scaling, and for a key that its kind does not have.
    """
    parameters = {"partial_rotary_factor": partial, **parameters}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in ("default", *SCALING_KEYS):
        raise UnknownConfigError(f"rope_type = {kind!r}, and only default, linear, llama3 and yarn can be followed")
    if parameters.pop("partial_rotary_factor") not in (None, 1.0):
        raise UnknownConfigError("partial_rotary_factor is not 1, and only whole heads can be rotated")
    keys: Keys = {"rope_base": float(parameters.get("rope_theta") or base)}
    own = {} if kind == "default" else {"factor": "factor", **SCALING_KEYS[kind]}
    more = ("mscale", "mscale_all_dim") if kind == "yarn" else ()
    if odd := [key for key in parameters if key not in ("rope_theta", "rope_type", "type", *own.values(), *more)]:
        raise UnknownConfigError(f"{odd[0]} = {parameters[odd[0]]!r:.60} is not known in a rope of type {kind}")
    if kind != "default":
        given = {"original_max_position_embeddings": original_positions, **parameters}
        optional = ("beta_fast", "beta_slow", "attention_factor", "truncate")
        if lacking := [key for key in own.values() if key not in optional and given.get(key) is None]:
            raise UnknownConfigError(f"a rope of type {kind} has no {lacking[0]}")
        given["factor"] = float(given["factor"])
        if kind == "yarn":
            given["truncate"] = bool(given.get("truncate", True))  # null is false in the library
            scales = [float(given.get(key) or 0.0) for key in more]
            if given.get("attention_factor") is None and all(scales):
                above, below = (yarn_attention_factor(given["factor"], scale) for scale in scales)
                given["attention_factor"] = above / below
        scaling = {ours: given[theirs] for ours, theirs in own.items() if given.get(theirs) is not None}
        keys["rope_scaling"] = {"kind": kind, **scaling}
    return keys


def write_rope(model: Any) -> Keys:
    """Return the keys of a config for rotary positions, as older and newer readers know them."""
    parameters: Keys = {"rope_type": "default"}
    if scaling := model.rope_scaling:
        own = {theirs: getattr(scaling, ours) for ours, theirs in SCALING_KEYS[scaling.kind].items()}
        parameters = {"rope_type": scaling.kind, "factor": scaling.factor}
        parameters |= {key: value for key, value in own.items() if value is not None}
    keys: Keys = {"rope_theta": model.rope_base, "rope_parameters": parameters | {"rope_theta": model.rope_base}}
    return keys | ({"rope_scaling": parameters} if model.rope_scaling else {})


def read_layer_pattern(config: Keys, every: int) -> Keys:
    """Return `window` and `global_every` of a config with layers of two kinds; by default each `every`-th is global.

    Raises UnknownConfigError where the global layers do not come at equal distances.
    """
    count = config["num_hidden_layers"]
    every = config.get("sliding_window_pattern") or every
    kinds = config.get("layer_types") or [_kind_of(i, every) for i in range(count)]
    if len(kinds) != count:
        raise UnknownConfigError(f"layer_types has {len(kinds)} layers, and num_hidden_layers = {count}")
    every = kinds.index("full_attention") + 1 if "full_attention" in kinds else count + 1
    if list(kinds) != [_kind_of(i, every) for i in range(count)]:
        raise UnknownConfigError("layer_types are in no regular order, which cannot be followed")
    if every == 1:
        return {}
    if config["sliding_window"] is None:
        raise UnknownConfigError("sliding_window = null, and layer_types has layers with a window")
    return {"window": config["sliding_window"], "global_every": every if every <= count else None}


def _kind_of(layer: int, every: int) -> str:
    return "sliding_attention" if (layer + 1) % every else "full_attention"


def whole(number: float | None) -> float | int | None:
    """Return a number as configs write it: an int where it is whole."""
    return int(number) if number is not None and float(number).is_integer() else number


def write_layer_pattern(model: Any) -> Keys:
    """Return the keys of a config for layers of two kinds. The library wants a window also where no layer has one."""
    local = [block.attention.window is not None for block in model.description.blocks]
    kinds = ["sliding_attention" if each else "full_attention" for each in local]
    return {"sliding_window": model.window or model.max_positions, "layer_types": kinds}
