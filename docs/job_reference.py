"""Writes docs/job.md from the code: every key of a job file, its type, its default and what it does.

python docs/job_reference.py            write it
python docs/job_reference.py --check    exit with 1 where it is not up to date
"""

import ast
import re
import sys
from pathlib import Path
from typing import get_args

from hpctrain.config.kernels import AttentionKernel
from hpctrain.config.training.decays import DECAYS
from hpctrain.config.training.optimizers import RULES

ROOT = Path(__file__).resolve().parents[1]
CONFIG, PAGE = ROOT / "hpctrain" / "config", ROOT / "docs" / "job.md"
SECTIONS = {
    "model": "Model",
    "model.rope_scaling": "RopeScaling",
    "data": "Data",
    "data.more": "Source",
    "train": "Train",
    "precision": "Precision",
    "plan": "PlanRequest",
    "search": "SearchBudget",
    "overlap": "Overlap",
    "kernels": "KernelChoice",
    "checkpoint": "Checkpoint",
    "comm": "Comm",
    "observe": "Observe",
    "watch": "Watch",
    "recovery": "Recovery",
}
TYPES = {
    "Count": "whole number >= 1",
    "WholeNumber": "whole number >= 0",
    "RankCount": "whole number >= 1",
    "LayerCount": "whole number >= 1",
    "Width": "whole number >= 1",
    "TokenCount": "whole number >= 1",
    "SequenceCount": "whole number >= 1",
    "PartCount": "whole number from 1 to 64",
    "ZeroStage": "`0` `1` `2` `3`",
    "Timeout": "seconds",
    "FilePath": "path",
    "str": "text",
    "bool": "true or false",
    "int": "whole number",
    "float": "number",
    "Source": "list of `[[data.more]]`",
    "RopeScaling": "keys of `[model.rope_scaling]`",
    "TensorSizes": "`{x, y, z}`, or a number",
    "Trained": "`fp32` `bf16` `fp16`",
    "AttentionKernel": " ".join(f"`{name}`" for name in get_args(AttentionKernel)),
}
ENTRIES = {"OptimizerName": RULES, "DecayName": DECAYS}
"""By type, the tables whose entries are named; each entry says what it means."""
TYPES |= {name: " ".join(f"`{entry}`" for entry in table) for name, table in ENTRIES.items()}
INTRODUCTION = """# Job files

This page lists every key of a job file. `python docs/job_reference.py` generates it from `hpctrain/config`.

A job file says what to train, on which data and how long. It is TOML. A short one:

```toml
[model]
preset = "gpt2-124m"
[data]
tokens = "tokens/mine.h5"
sequence_length = 1024
[train]
steps = 1000
global_batch = 64
```

- `extends = "base.toml"` starts from another file, relative to this one; `extends = "tiny"` from a ready-made job.
- The name of a preset is a job, too: `hpctrain train qwen3-30b-a3b`. Its tokens are `tokens/stdlib.h5`,
  and its rows have 4,096 positions, or as many as the model has.
- `name = "run-a"` names the run folder. The default is the file's name.
- `--set SECTION.KEY=VALUE` on the command line has the last word.
- `auto` is replaced by a value at the start. Value and reason are in `resolved.toml` of the run folder.
- An unknown key is refused, with the closest known one.
- A number is written as a number: `"8"` and `true` are refused, and `8.0` where a whole number belongs.
- Numbers have upper limits far beyond any machine, such as 100,000 ranks. `hpctrain/config/bounds.py` has them all.
"""


def main() -> int:
    text = reference("\n".join(source.read_text() for source in sorted(CONFIG.rglob("*.py"))))
    if "--check" in sys.argv[1:]:
        if PAGE.read_text() != text:
            print(f"{PAGE} is not what the code says; run python docs/job_reference.py", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(text)
    return 0


def reference(source: str) -> str:
    """Return the page for the source of the job's tables."""
    tree = ast.parse(source)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    parts = [INTRODUCTION]
    for section, name in SECTIONS.items():
        node = classes[name]
        about = ast.get_docstring(node)
        parts.append(f"\n## [{section}]\n" + (f"\n{_one_line(about)}\n" if about else ""))
        parts.append("\n| key | values | default | meaning |\n|---|---|---|---|\n")
        parts += _rows(node)
        parts += _presets() if section == "model.rope_scaling" else []
    return "".join(parts)


def _presets() -> list[str]:
    from hpctrain.architectures.registry import presets
    from hpctrain.config.job import Model
    from hpctrain.sharding.parameters import count_parameters

    rows = ["\n### Presets\n"]
    rows += ["\n| preset | architecture | blocks | hidden size | parameters |\n|---|---|---|---|---|\n"]
    for name, values in presets().items():
        vocabulary = values.get("vocab_size") or 1024
        model = Model.model_validate(values | {"vocab_size": vocabulary})
        size = f"{count_parameters(model) / 1e6:,.0f} M"
        rows.append(f"| `{name}` | {model.architecture} | {model.num_layers} | {model.hidden_size} | {size} |\n")
    return rows


def _rows(node: ast.ClassDef) -> list[str]:
    rows = []
    for field, after in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        is_documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        meaning = _one_line(str(after.value.value)) if is_documented else ""
        values, can_be_auto = _values(ast.unparse(field.annotation))
        for entry, described in ENTRIES.get(ast.unparse(field.annotation), {}).items():
            meaning += f" `{entry}`: {described.meaning}"
        default = _default(field.value, can_be_auto)
        rows.append(f"| `{field.target.id}` | {values} | {default} | {meaning} |\n")
    return rows


def _values(annotation: str) -> tuple[str, bool]:
    """Return the values of a field in words, and whether it can be `auto`."""
    can_be_auto = "AUTO" in annotation
    if literal := re.search(r"Literal\[([^]]*)\]", annotation):
        values = " ".join(f"`{each.strip().strip(chr(39))}`" for each in literal[1].split(","))
    elif annotation.startswith("dict"):
        values = "table"
    else:
        names = [name for name in re.findall(r"[A-Za-z]+", annotation) if name in TYPES]
        values = TYPES[names[0]] if names else "number"
        if re.search("tuple|Several", annotation) and not values.startswith("list"):
            values = f"list, each {values}"
    return (f"{values}, or `auto`" if can_be_auto else values), can_be_auto


def _default(value: ast.expr | None, can_be_auto: bool) -> str:
    if value is None:
        return "required"
    text = ast.unparse(value)
    if text.startswith("(") and text != "()":
        return f"`{list(ast.literal_eval(text))}`"
    if text == "None":
        return "`auto`" if can_be_auto else "none"
    if text.startswith("Field(default_factory"):
        return "empty"
    try:
        value = eval(text, {"__builtins__": {}})  # arithmetic such as 4 << 20
    except Exception:
        return "1 each" if text == "TensorSizes()" else f"`{text}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\\\|")


if __name__ == "__main__":
    sys.exit(main())
