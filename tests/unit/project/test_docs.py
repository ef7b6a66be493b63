"""The documentation: its commands exist, its links lead somewhere, what is generated is up to date."""

import argparse
import ast
import importlib
import itertools
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import click
import pytest

from hpctrain import PUBLIC
from hpctrain.architectures.registry import families
from hpctrain.cli import root
from hpctrain.config.clusters.cluster_file import parse_cluster
from hpctrain.config.tables import parse_toml
from hpctrain.plan.file import parse_plan

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
INLINE = re.compile(r"`((?:mpirun -n \d+ )?python -m benchmarks\.[^`]*)`")
"""Commands within a sentence or a table."""
LAUNCHERS = ("mpirun", "srun", "sbatch")


def blocks(page: Path, kind: str) -> list[str]:
    return [text for language, text in BLOCK.findall(page.read_text()) if language == kind]


def commands() -> list[tuple[str, str]]:
    """Return (page, command) for each line of a console block that begins with a prompt."""
    commands = []
    for page in PAGES:
        for text in blocks(page, "console"):
            lines = text.replace("\\\n", " ").splitlines()
            commands += [(page.name, line[2:].split("  #")[0].strip()) for line in lines if line.startswith("$ ")]
        if page.name == "benchmarks.md":
            commands += [(page.name, command) for command in INLINE.findall(page.read_text())]
    return commands


def parse(command: click.Command, name: str, arguments: list[str], parent: click.Context | None = None) -> None:
    """Parse arguments as click does, without running anything. Raises click.UsageError."""
    if "--help" in arguments or "--version" in arguments:
        arguments = [each for each in arguments if each not in ("--help", "--version")]
    context = click.Context(command, info_name=name, parent=parent)
    if isinstance(command, click.Group):
        if not arguments:
            return
        sub_name, sub, rest = command.resolve_command(context, arguments)
        assert sub is not None and sub_name is not None
        parse(sub, sub_name, rest, context)
    else:
        command.parse_args(context, arguments)


def without_launcher(words: list[str]) -> list[str]:
    """Return a command without `mpirun -n 8`, `srun -n 16` and variables before it."""
    while words and (words[0] in LAUNCHERS or words[0] == "env" or "=" in words[0] or words[0].startswith("-")):
        words = words[2:] if words[0].startswith("-") else words[1:]
    return words


class ParsedError(Exception):
    """Ends a program whose arguments have been read."""


def parse_benchmark(monkeypatch, module: str, arguments: list[str]) -> None:
    """Parse arguments as a program of the benchmarks does, without running it. Ends with SystemExit or UsageError."""
    loaded = importlib.import_module(module)
    for name in ("command", "main"):
        if isinstance(command := getattr(loaded, name, None), click.Command):
            return parse(command, module, arguments)
    if not hasattr(loaded, "argparse"):
        assert len(arguments) <= (module == "benchmarks.start"), "it takes none, or a job"
        return None
    parse_args = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser):
        parse_args(parser, arguments)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    with pytest.raises(ParsedError):
        loaded.main()
    return None


def called_commands() -> list[tuple[str, list[str]]]:
    """Return (file, leading words) of each command of hpctrain that a program of the benchmarks starts by `call`."""
    found = []
    for path in sorted((ROOT / "benchmarks").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id != "call":
                continue
            if any(keyword.arg == "module" for keyword in node.keywords):
                continue
            constants = itertools.takewhile(lambda argument: isinstance(argument, ast.Constant), node.args)
            if words := [str(each.value) for each in constants if isinstance(each, ast.Constant)]:
                found.append((path.name, words))
    return found


def test_benchmarks_start_commands_that_there_are():
    """One test for all: every process that collects tests would read the benchmarks for their names."""
    context, called = click.Context(root), called_commands()
    assert called
    for file, words in called:
        command: click.Command = root
        for word in words:
            if not isinstance(command, click.Group):
                break
            known = command.get_command(context, word)
            assert known is not None, f"{file}: {words}"
            command = known
        assert not isinstance(command, click.Group), f"{file}: {words}"


def test_the_job_reference_names_every_architecture():
    (row,) = re.findall(r"^\| `architecture` .*", (ROOT / "docs/job.md").read_text(), re.M)
    assert all(f"`{name}`" in row for name in families())


@pytest.mark.parametrize(("page", "command"), commands(), ids=lambda text: text[:60])
def test_every_command_of_the_documentation_is_one(monkeypatch, page, command):
    words = without_launcher(shlex.split(command))
    match words:
        case ["hpctrain", *arguments]:
            parse(root, "hpctrain", arguments)
        case ["make", target, *_]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M), "a target of the Makefile"
        case ["python", "-m", module, *arguments]:
            assert find_spec(module), "a module"
            if module.startswith("benchmarks."):
                parse_benchmark(monkeypatch, module, arguments)
        case [script] if script.startswith("runs/"):  # written by the command above it
            assert page == "slurm.md"
        case ["python", script, *_] | [script, *_] if script.endswith((".py", ".sbatch", ".sh")):
            assert (ROOT / script).is_file(), "a file of the repository"
        case [program, *_]:
            assert program in (
                "pip",
                "git",
                "cd",
                "cat",
                "module",
                "source",
                "scontrol",
                "h5ls",
                "diff",
                "ls",
                "echo",
                "export",
            ), f"{page}: {command}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_toml_in_the_documentation_is_read(page):
    for text in blocks(page, "toml"):
        tree = parse_toml(text, page.name, ValueError)
        if "families" in tree and "nodes" in tree:
            parse_cluster(text, page.name)
        elif "tile" in tree and "microbatches" in tree:
            parse_plan(text, page.name)


def test_the_job_reference_is_what_the_code_says():
    script = ROOT / "docs" / "job_reference.py"
    assert subprocess.run([sys.executable, script, "--check"], cwd=ROOT, timeout=60).returncode == 0


def test_every_page_is_in_the_site():
    listed = (ROOT / "mkdocs.yml").read_text()
    assert not [page.name for page in (ROOT / "docs").glob("*.md") if f": {page.name}\n" not in listed]


def test_the_page_of_the_library_is_what_the_docstrings_say():
    script = ROOT / "docs" / "api_reference.py"
    assert subprocess.run([sys.executable, script, "--check"], cwd=ROOT, timeout=60).returncode == 0


def test_the_public_names_are_there_and_the_example_runs():
    import hpctrain

    assert all(getattr(hpctrain, name) for name in PUBLIC)
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "from_python.py"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and "tokens/s, fits: True" in done.stdout, done.stderr
