"""Writes docs/api.md from docstrings: every public name of the library, its signature and what it does.

python docs/api_reference.py            write it
python docs/api_reference.py --check    exit with 1 where it is not up to date
"""

import inspect
import re
import sys
import textwrap
from dataclasses import fields
from pathlib import Path

import hpctrain

PAGE = Path(__file__).with_name("api.md")
INTRODUCTION = """\
# The library

This page lists all that `import hpctrain` offers. `python docs/api_reference.py` generates it from docstrings.
Everything else may change without notice. Nothing here needs ranks or devices; `import hpctrain` imports neither torch
nor MPI.
"""


def entry(name: str) -> str:
    """Return the section of a public name."""
    thing = getattr(hpctrain, name)
    parts = [f"## {name}"]
    if inspect.isfunction(thing):
        parts.append(f"```python\n{_signature(name, thing)}\n```")
    parts.append(_text(thing))
    if thing is hpctrain.PlanResult:
        members = [f"- `{field.name}`" for field in fields(thing)]
        parts.append("\n".join([*members, *(f"- `{line}`: {about}" for line, about in _methods(thing))]))
    return "".join(f"\n{part}\n" for part in parts if part)


def _signature(name: str, function) -> str:
    text = re.sub(r"<function (\w+) at \w+>", r"\1", str(inspect.signature(function)))
    return re.sub(r"\bhpctrain(?:\.\w+)+\.(\w+)|collections\.abc\.|pathlib\.", lambda m: m[1] or "", f"{name}{text}")


def _text(thing) -> str:
    return textwrap.dedent(inspect.getdoc(thing) or "")


def _methods(thing) -> list[tuple[str, str]]:
    """Return the methods and properties that the class itself defines, each with its first sentence."""
    result = []
    for name, member in vars(thing).items():
        member = getattr(member, "__func__", member)
        about = (inspect.getdoc(member) or "").split("\n\n")[0].replace("\n", " ")
        if name.startswith("_") or not about or not (inspect.isfunction(member) or isinstance(member, property)):
            continue
        result.append((f"{name}()" if inspect.isfunction(member) else name, about))
    return result


def main() -> int:
    text = INTRODUCTION + "".join(entry(name) for name in hpctrain.PUBLIC)
    if "--check" in sys.argv[1:]:
        if not PAGE.exists() or PAGE.read_text() != text:
            print(f"{PAGE} is not what the code says; run python docs/api_reference.py", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
