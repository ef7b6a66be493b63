"""The house can be read: no circles of imports, docstrings that are sentences, names of files that there are."""

import ast
import functools
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "hpctrain"
FRAGMENT = re.compile(
    r"(Of|By|And|That|To|As|In|On|For|With|From|Whether|Where|What|Who|How|Which|So|If|Beyond|Left)\b "
)
"""How a docstring begins that continues a name."""
FILE_NAME = re.compile(r"`{1,2}(?:[\w./-]*/)?([\w-]+\.(?:py|md|sbatch|sh))`{1,2}")
MODULE_RUN = re.compile(r"python -m ((?:benchmarks|tests)(?:\.[a-z_]+)+)")


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Return the modules of the package by their names."""
    paths = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sorted(PACKAGE.rglob("*.py"))}
    return {name.removesuffix(".__init__"): ast.parse(path.read_text()) for name, path in paths.items()}


def all_imports_of(tree: ast.Module, modules: set[str]) -> set[str]:
    """Return the modules that a file imports, inside functions and for types alone too."""
    return imports_of(tree, modules, set())


def imports_of(tree: ast.Module, modules: set[str], left_out: set[int] | None = None) -> set[str]:
    """Return the modules that a file imports, for types alone too, but for those inside functions."""
    inside = left_out
    if inside is None:
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        inside = {id(node) for function in functions for node in ast.walk(function)}
    result = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and id(node) not in inside:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                result.add(full if full in modules else node.module)
    return result & modules


def circle_of(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_files_import_each_other_in_a_circle():
    parsed = trees()
    assert not circle_of({name: imports_of(tree, set(parsed)) - {name} for name, tree in parsed.items()})


def test_a_circle_is_seen():
    tree = ast.parse("from a import b\nif TYPE_CHECKING:\n    from a.c import D\ndef f():\n    from a.d import e")
    assert imports_of(tree, {"a.b", "a.c", "a.d"}) == {"a.b", "a.c"}
    assert set(circle_of({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})) == {"a", "b", "c"}


def test_docstrings_are_sentences():
    """A docstring stands alone: it does not continue the name, as "Of a step." does."""
    fragments = [
        f"{name}: {text.splitlines()[0]}"
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if (text := ast.get_docstring(node)) and FRAGMENT.match(text)
    ]
    assert not fragments


def test_files_that_are_named_exist():
    """In docstrings and comments files of the project, in pages also what is started as a module."""
    pages = [
        *(ROOT / "docs").rglob("*.md"),
        *ROOT.glob("*.md"),
        *PACKAGE.rglob("*.py"),
        *(ROOT / "benchmarks").rglob("*.py"),
    ]
    there = {
        path.name
        for folder in ("hpctrain", "tests", "benchmarks", "docs", "slurm", "examples")
        for path in (ROOT / folder).rglob("*")
    }
    there |= {path.name for path in ROOT.iterdir()}
    missing = []
    for page in pages:
        text = page.read_text()
        names = FILE_NAME.findall(text) if page.suffix == ".py" else []
        missing += [f"{page.relative_to(ROOT)}: {name}" for name in names if name not in there]
        for module in MODULE_RUN.findall(text):
            target = ROOT.joinpath(*module.split("."))
            if not target.with_suffix(".py").exists() and not (target / "__main__.py").exists():
                missing.append(f"{page.relative_to(ROOT)}: python -m {module}")
    assert not missing


ROOMS_IN_ORDER = ("comm", "config", "engine", "model", "observe", "plan", "planner", "software")
ORDER_LINE = re.compile(r"^    (\w+)/? +\S")


def reading_order(room: str) -> list[str]:
    """Return the files and folders of a room in the order that its docstring gives."""
    text = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text()), clean=False) or ""
    return [match[1] for line in text.splitlines() if (match := ORDER_LINE.match(line))]


def against_order(room: str, order: list[str], imports: dict[str, set[str]]) -> list[str]:
    """Return the imports inside a room that go to a later place of its order. A file without a place may import all."""
    prefix = f"hpctrain.{room}."
    place = {name: number for number, name in enumerate(order)}
    inside = {
        name: {other.removeprefix(prefix).split(".")[0] for other in others if other.startswith(prefix)}
        for name, others in imports.items()
        if name.startswith(prefix)
    }
    wrong = []
    for name, others in inside.items():
        own = name.removeprefix(prefix).split(".")[0]
        wrong += [f"{name} imports {other}" for other in others if place.get(other, 0) > place.get(own, len(order))]
    return wrong


def test_rooms_are_read_in_the_order_that_they_give():
    parsed = trees()
    imports = {name: all_imports_of(tree, set(parsed)) for name, tree in parsed.items()}
    assert not [line for room in ROOMS_IN_ORDER for line in against_order(room, reading_order(room), imports)]


def test_an_import_against_the_order_is_seen():
    imports = {"hpctrain.comm.world": {"hpctrain.comm.start.pmi"}, "hpctrain.comm.start.pmi": {"hpctrain.comm.world"}}
    assert against_order("comm", ["start", "world"], imports) == ["hpctrain.comm.start.pmi imports world"]
    assert not against_order("comm", ["start"], imports), "a new file needs no line"
