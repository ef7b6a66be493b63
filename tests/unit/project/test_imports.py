"""Imports run downwards between the rooms, and what runs on a login node needs neither torch nor MPI."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[3] / "hpctrain"
FLOORS = (
    ("architectures",),
    ("config",),
    ("sharding",),
    ("plan",),
    ("launch",),
    ("comm",),
    ("model", "planner", "rehearsal", "data"),
    ("software",),
    ("engine", "checkpoint", "observe"),
    ("jobs",),
)
LIGHT = ("architectures", "config", "sharding", "plan", "planner", "software", "launch")


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def modules() -> list[tuple[str, Path]]:
    return [(path.relative_to(PACKAGE).parts[0], path) for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE]


def test_imports_run_downwards():
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    upwards = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for room, path in modules()
        for name in imported(path)
        if name.startswith("hpctrain.") and floor.get(name.split(".")[1], -1) > floor[room]
    ]
    assert not upwards


def test_the_model_knows_communicators_as_an_interface():
    assert not [
        path.name for room, path in modules() if room == "model" and any("hpctrain.comm" in n for n in imported(path))
    ]


def test_what_runs_on_a_login_node_is_light():
    heavy = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for room, path in modules()
        for name in imported(path)
        if room in LIGHT and name.split(".")[0] in ("torch", "mpi4py", "cupy")
    ]
    assert not heavy
