"""Model shapes by name. A job names one and overrides what it likes.

Sources: GPT-2 (Radford et al. 2019), Llama 2 and 3 and TinyLlama (their published config files),
gpt-5b ... gpt-80b (AxoNN 4D, arXiv 2305.13525, table of models).
"""

_GPT2 = {"architecture": "gpt2", "vocab_size": 50257, "max_positions": 1024, "tie_head": True}
_LLAMA = {"architecture": "llama", "tie_head": False}
_LLAMA3 = {**_LLAMA, "vocab_size": 128256, "max_positions": 8192, "rope_base": 500000.0}
_AXONN = {"architecture": "gpt2", "vocab_size": 51200, "max_positions": 2048, "tie_head": True}


def _size(layers: int, hidden: int, heads: int, **more) -> dict:
    return {"num_layers": layers, "hidden_size": hidden, "num_heads": heads, **more}


PRESETS: dict[str, dict] = {
    "tiny": {**_LLAMA, **_size(4, 192, 6, num_kv_heads=2, ffn_size=512), "max_positions": 2048},
    "tiny-gpt2": {**_GPT2, **_size(4, 192, 6), "vocab_size": None},
    "gpt2-124m": {**_GPT2, **_size(12, 768, 12)},
    "gpt2-1.5b": {**_GPT2, **_size(48, 1600, 25)},
    "llama-1b": {
        **_LLAMA,
        **_size(22, 2048, 32, num_kv_heads=4, ffn_size=5632),
        "vocab_size": 32000,
        "max_positions": 2048,
    },
    "llama-8b": {**_LLAMA3, **_size(32, 4096, 32, num_kv_heads=8, ffn_size=14336)},
    "llama-70b": {**_LLAMA3, **_size(80, 8192, 64, num_kv_heads=8, ffn_size=28672)},
    "gpt-5b": {**_AXONN, **_size(24, 4096, 32)},
    "gpt-10b": {**_AXONN, **_size(32, 5120, 40)},
    "gpt-20b": {**_AXONN, **_size(32, 7168, 56)},
    "gpt-40b": {**_AXONN, **_size(38, 9216, 72)},
    "gpt-80b": {**_AXONN, **_size(42, 12288, 96)},
}
