"""Reads a report as a browser would, and compares its numbers with the files that they name."""

import json
import re
import tomllib
from html.parser import HTMLParser

NUMBER = re.compile(r"-?[\d,]*\.?\d+(?:e-?\d+)?")
UNITS = {"µs": 1e-6, "ms": 1e-3, "s": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "k": 1e3, "M": 1e6, "%": 0.01}


class Page(HTMLParser):
    """The numbers of a page with their sources, and the shapes that are drawn from files."""

    def __init__(self, text: str):
        super().__init__()
        self.numbers: list[tuple[str, float, str]] = []
        self.shapes: list[tuple[str, dict, dict]] = []
        """Tag, attributes, and those of the picture that it is in."""
        self.tags: list[str] = []
        self._open: tuple[str, float] | None = None
        self._svg: dict = {}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        self.tags.append(tag)
        if tag == "svg":
            self._svg = named
        elif tag == "data":
            self._open = named["data-from"], float(named["value"])
        elif "data-from" in named:
            self.shapes.append((tag, named, self._svg))

    def handle_data(self, data):
        if self._open:
            self.numbers.append((*self._open, data))
            self._open = None


def dig(tree, path):
    for key in path.split("."):
        tree = tree[int(key)] if isinstance(tree, list) else tree.get(key) if isinstance(tree, dict) else None
    return tree


def in_files(folder, source):
    """Return every value that a source names."""
    file, _, path = source.partition("/")[2].partition(":")
    if file == "forecast":
        starts = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        return [start["predicted_seconds"] for start in starts if start["event"] == "start"]
    if file == "timeline.json" and path == "end":
        grids = json.loads((folder / file).read_text())["grids"]
        return [max(span[4] for grid in grids for span in grid["spans"])]
    text = (folder / file).read_text()
    if file.endswith(".toml"):
        return [dig(tomllib.loads(text), path)]
    trees = [json.loads(line) for line in text.splitlines()] if file.endswith(".jsonl") else [json.loads(text)]
    return [value for tree in trees if (value := dig(tree, path)) is not None]


def check_numbers(run, page):
    for source, value, shown in page.numbers:
        assert value in in_files(run, source), source
        digits = NUMBER.search(shown)
        assert digits, shown
        unit = shown[digits.end() :].strip().split(" ")[0]
        scale = UNITS.get(unit, 1)
        decimals, exponent = re.fullmatch(r"[^.e]*\.?(\d*)(?:e(-?\d+))?", digits[0]).groups()  # pyright: ignore
        half_a_digit = 0.5 * 10.0 ** (int(exponent or 0) - len(decimals)) * scale
        read = float(digits[0].replace(",", "")) * scale
        assert abs(read - abs(value)) <= 1.001 * half_a_digit, f"{source}: {value} is shown as {shown}"
