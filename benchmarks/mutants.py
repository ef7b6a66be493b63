"""Mutated files, each with what a command must do with it. Deterministic by seed. Pure but for reading a template."""

import json
import os
import random
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REFUSE, ACCEPT, SAME, EITHER = "refuse", "accept", "same", "either"
"""What is right: to refuse; to accept; to refuse, or to do what is done with the intact file; or any of these."""


@dataclass(frozen=True)
class Mutant:
    """One file in place of an intact one."""

    kind: str
    what: str
    """What was changed, in a few words."""
    name: str
    """Of the file, in the folder."""
    right: str
    data: bytes | None = None
    make: Callable[[Path], None] | None = None
    """Makes what is no regular file."""
    more: Mapping[str, bytes] = field(default_factory=dict)
    """Further files."""

    def write(self, folder: Path) -> None:
        """Put it in place of the intact file."""
        path = folder / self.name
        path.unlink(missing_ok=True)
        for name, data in self.more.items():
            (folder / name).write_bytes(data)
        if self.make:
            self.make(path)
        else:
            path.write_bytes(self.data or b"")


class Raw(str):
    """TOML as it stands."""


MANY_DIGITS = Raw("9" * 5000)
DEEP = Raw("[" * 20_000 + "]" * 20_000)
LONG = "n" * 300
HUGE = 10**9

# By what a key wants: values that are wrong, whatever the key.
WRONG: dict[str, Sequence[Any]] = {
    "count": (True, "8", 8.0, -1, 0, 1.5, Raw("nan"), Raw("inf"), MANY_DIGITS, 2**70, [], [1], Raw("{}"), DEEP, ""),
    "whole": (True, "8", 8.0, -1, 1.5, Raw("nan"), MANY_DIGITS, 2**70, [], Raw("{}"), DEEP),
    "real": (True, "8", "1e-3", -1.0, Raw("nan"), Raw("inf"), Raw("-inf"), MANY_DIGITS, 1e300, [], Raw("{}"), DEEP, ""),
    "switch": (1, 0, "true", "yes", 1.0, [], Raw("{}"), MANY_DIGITS),
    "word": (3, True, 1.5, "nosuch", "", "a\0b", LONG, [], Raw("{}"), MANY_DIGITS, Raw("1979-05-27")),
    "path": (3, True, "no\0such", LONG, "", "nosuch/file", ".", "loop", "/dev/zero", [], Raw("{}"), MANY_DIGITS),
    "interval": (
        3, "0,4", [0], [0, 1, 2], [True, 4], ["0", "4"], [0.0, 4.0], [4, 0], [-1, 4], [2, 2], [0, HUGE], [0, 2**70],
        Raw(f"[0, {MANY_DIGITS}]"), [],
    ),
    "ranks": (3, "0", [True], ["0"], [0.0], [-1], [0, 0], [2, HUGE], [0, 2**70], [], Raw(f"[{MANY_DIGITS}]")),
    "table": (3, "x", True, [], [1], MANY_DIGITS),
}  # fmt: skip
# Larger than anything real: to be refused or harmless, and never slow.
LARGE = (10**6, 10**9, 10**12, 2**62)

JOB_KEYS = {
    "model.architecture": "word", "model.num_layers": "count", "model.hidden_size": "count",
    "model.num_heads": "count", "model.num_kv_heads": "count", "model.vocab_size": "count", "model.tie_head": "switch",
    "model.max_positions": "count", "model.norm_epsilon": "real", "model.init_std": "real", "model.rope_base": "real",
    "data.tokens": "path", "data.sequence_length": "count", "data.validation_fraction": "real",
    "data.mask_documents": "switch", "train.steps": "count", "train.global_batch": "count",
    "train.learning_rate": "real", "train.weight_decay": "real", "train.beta1": "real", "train.epsilon": "real",
    "train.clip_norm": "real", "train.warmup_steps": "whole", "train.dtype": "word", "train.validate_every": "whole",
    "train.validation_sequences": "count", "plan.tensor": "table", "plan.pipeline": "count", "plan.data": "count",
    "plan.microbatch": "count", "plan.recompute": "word", "plan.zero": "whole", "plan.schedule": "word",
    "plan.virtual_stages": "count", "search.seconds": "real", "search.plans": "count", "search.must_fit": "switch",
    "overlap.tensor": "switch", "overlap.keep_gathered": "whole", "overlap.bucket_bytes": "count",
    "checkpoint.every": "whole", "checkpoint.keep": "count", "observe.log_every": "count",
    "observe.step_timeout_seconds": "real", "observe.trace": "switch", "comm.gather_messages": "switch",
    "extends": "path", "name": "word", "model": "table", "data": "table",
    "train": "table", "plan": "table",
}  # fmt: skip
PLAN_KEYS = {
    "schedule": "word", "microbatches": "count", "rows": "count", "unused": "ranks", "tile.0.items": "interval",
    "tile.0.rows": "interval", "tile.0.ranks": "ranks", "tile.0.tensor": "table", "tile.0.family": "word",
    "tile.0.recompute": "word", "tile.0.zero": "whole", "tile.0.state_share": "count", "tile.0.row_chunks": "count",
    "tile.0.extra_warmup": "whole", "tile.0.tensor.x": "count", "tile.0.tensor.y": "count", "tile": "table",
}  # fmt: skip
CLUSTER_KEYS = {
    "families.cpu.kind": "word", "families.cpu.memory_bytes": "count", "families.cpu.memory_bytes_per_second": "real",
    "families.cpu.peak_flops_per_second.fp32": "real", "families.cpu.origin": "word", "families.cpu": "table",
    "families.cpu.half_speed_rows": "real", "families": "table", "nodes": "table", "nodes.0.count": "count",
    "nodes.0.devices.cpu": "count", "nodes.0.devices": "table", "nodes.0.link_latency_seconds": "real",
    "nodes.0.link_bytes_per_second": "real", "nodes.0.nics.0.fabric": "word", "nodes.0.nics.0.count": "count",
    "nodes.0.nics.0.send_bytes_per_second": "real", "fabrics.ib.latency_seconds": "real", "nodes.0.ranks": "ranks",
    "truth.time_scale": "real", "truth.devices": "table", "links": "table", "profiles": "table",
}  # fmt: skip
# Where a value that is wrong elsewhere is right, or where nothing is known: (key, value) to what is right.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("families.cpu.memory_bytes", "8.0"): EITHER, ("plan.microbatch", '"auto"'): ACCEPT,
    ("tile.0.items", "[0, 4]"): EITHER, ("name", '"nosuch"'): ACCEPT, ("tile.0.family", '"nosuch"'): EITHER,
    ("links", "[]"): ACCEPT, ("profiles", "[]"): ACCEPT, ("unused", "[]"): ACCEPT,
    ("fabrics.ib.latency_seconds", "1e+300"): EITHER, ("nodes.0.ranks", "[]"): EITHER,
    ("nodes.0.nics.0.fabric", '"nosuch"'): REFUSE, ("unused", "[2, 1000000000]"): REFUSE,
    ("tile.0.family", '"' + LONG + '"'): EITHER, ("tile.0.family", '""'): EITHER,
    ("nodes.0.devices.cpu", "-1"): REFUSE, ("plan.tensor", "3"): EITHER, ("plan.tensor", "true"): REFUSE,
}  # fmt: skip


def toml(value: Any) -> str:
    """Write plain data as TOML, tables in line."""
    match value:
        case Raw():
            return str(value)
        case bool():
            return str(value).lower()
        case dict():
            return "{" + ", ".join(f"{json.dumps(key)} = {toml(inner)}" for key, inner in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(toml, value)) + "]"
        case str():
            return json.dumps(value)
        case float():
            return repr(value)
        case _:
            return str(value)


def document(tree: Mapping[str, Any]) -> bytes:
    """Write a whole file, a line for each key of the first two levels."""
    lines, tables = [], []
    for key, value in tree.items():
        if isinstance(value, dict) and not isinstance(value, Raw):
            tables += [f"[{key}]", *(f"{json.dumps(inner)} = {toml(v)}" for inner, v in value.items())]
        else:
            lines.append(f"{key} = {toml(value)}")
    return ("\n".join([*lines, *tables]) + "\n").encode()


def _put(tree: Any, key: str, value: Any) -> None:
    *above, last = [int(part) if part.isdigit() else part for part in key.split(".")]
    at = tree
    for part in above:
        at = at[part] if isinstance(at, list) else at.setdefault(part, {})
    at[last] = value


def wrong_values(kind: str, name: str, text: str, keys: Mapping[str, str]) -> list[Mutant]:
    """Return the file with each key set to each value that is wrong for it."""
    tree, result = tomllib.loads(text), []
    for key, wanted in keys.items():
        for value in WRONG[wanted]:
            changed = deepcopy(tree)
            _put(changed, key, value)
            written = toml(value)
            right = EXCEPTIONS.get((key, written), REFUSE)
            if wanted == "path" and key != "extends" and type(value) is str and "\0" not in value:
                right = EITHER  # a path that leads nowhere is found out by who goes there
            if wanted == "real" and written == "1e+300" and kind != "job":
                right = EITHER
            result.append(Mutant(kind, f"{key} = {_short(written)}", name, right, document(changed)))
        for value in LARGE if wanted in ("count", "whole") else ():
            changed = deepcopy(tree)
            _put(changed, key, value)
            result.append(Mutant(kind, f"{key} = {value}", name, EITHER, document(changed)))
    return result


def _short(text: str) -> str:
    return text if len(text) < 40 else f"{text[:12]}… ({len(text)} characters)"


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _nested(depth: int) -> bytes:
    return (".".join(["a"] * depth) + " = 1\n").encode()


def structural(kind: str, name: str, text: str) -> list[Mutant]:
    """Return what is wrong with a TOML file as a whole: its ends, its keys, its kind of file."""
    data = text.encode()
    first = next(line for line in text.splitlines() if "=" in line)
    cases: list[tuple[str, str, bytes]] = [
        ("empty", REFUSE, b""),
        ("one zero byte", REFUSE, b"\0"),
        ("a zero byte at the end", REFUSE, data + b"\0"),
        ("random bytes", REFUSE, random.Random(1).randbytes(4096)),
        ("an HDF5 signature", REFUSE, b"\x89HDF\r\n\x1a\n" + bytes(512)),
        ("a byte order mark of UTF-16", REFUSE, text.encode("utf-16")),
        ("a key twice", REFUSE, (first + "\n" + first + "\n").encode() + data),
        ("100,000 keys twice", REFUSE, b"a = 1\n" * 100_000 + data),
        ("an unknown key", REFUSE, b"nosuch = 1\n" + data),
        ("an unknown table", REFUSE, data + b"[nosuch]\nx = 1\n"),
        ("a key of 300 letters", REFUSE, f"{LONG} = 1\n".encode() + data),
        ("100,000 unknown keys", REFUSE, b"".join(b"a%d = 1\n" % i for i in range(100_000)) + data),
        ("arrays in arrays", REFUSE, b"nosuch = " + b"[" * 50_000 + b"]" * 50_000 + b"\n" + data),
        ("tables in tables", REFUSE, b"nosuch = " + b"{a=" * 5_000 + b"1" + b"}" * 5_000 + b"\n" + data),
        ("dotted keys, 300 deep", REFUSE, _nested(300) + data),
        ("dotted keys, 20,000 deep", REFUSE, _nested(20_000) + data),
        ("a header 20,000 deep", REFUSE, data + b"[" + b".".join([b"a"] * 20_000) + b"]\nx = 1\n"),
        ("an integer of 5,000 digits", REFUSE, f"nosuch = {MANY_DIGITS}\n".encode() + data),
        ("a string of 30 MB", REFUSE, b'nosuch = "' + b"x" * 30_000_000 + b'"\n' + data),
        ("brackets, 1 MB", REFUSE, b"[" * 1_000_000),
        ("quotes, 1 MB", REFUSE, b'"' * 1_000_001),
        ("an end of line of DOS", ACCEPT, text.replace("\n", "\r\n").encode()),
        ("a comment at the end", ACCEPT, data + b"# the end"),
    ]
    made = [Mutant(kind, what, name, right, changed) for what, right, changed in cases]
    special: list[tuple[str, Callable[[Path], None]]] = [
        ("a folder", Path.mkdir),
        ("a link to itself", _loop),
        ("a link to nothing", lambda path: path.symlink_to("nowhere")),
        *((f"a {what}", make) for what, make in NO_FILES.items()),
        ("not there", lambda path: None),
    ]
    return made + [Mutant(kind, what, name, REFUSE, make=make) for what, make in special]


def extended(name: str, text: str) -> list[Mutant]:
    """Return job files whose `extends` leads nowhere."""
    data = text.encode()
    chain = {f"chain{i}.toml": f'extends = "chain{i + 1}.toml"\n'.encode() for i in range(2000)}
    chain["chain2000.toml"] = data
    one = b'extends = "other.toml"\n'
    return [
        Mutant("job", "extends itself", name, REFUSE, f'extends = "{name}"\n'.encode() + data),
        Mutant("job", "extends each other", name, REFUSE, one, more={"other.toml": f'extends = "{name}"\n'.encode()}),
        Mutant("job", "extends 2,000 files", name, REFUSE, b'extends = "chain0.toml"\n', more=chain),
        Mutant("job", "extends a link to itself", name, REFUSE, b'extends = "loop"\n' + data),
        Mutant("job", "extends a folder", name, REFUSE, b'extends = "."\n' + data),
        Mutant("job", "extends a good file", name, ACCEPT, one, more={"other.toml": data}),
    ]


def garbled_text(kind: str, name: str, text: str, count: int, seed: int) -> list[Mutant]:
    """Return TOML with bytes changed, left out, doubled and cut off at random places."""
    dice, data, result = random.Random(f"{kind}{seed}"), text.encode(), []
    intact = tomllib.loads(text)
    for number in range(count):
        changed = bytearray(data)
        for _ in range(dice.choice((1, 1, 2, 8))):
            at = dice.randrange(len(changed))
            match dice.randrange(5):
                case 0:
                    changed[at] = dice.randrange(256)
                case 1:
                    changed[at] = dice.choice(b"0123456789-.\"'[]{}=,\n# truefalsnx_")
                case 2:
                    del changed[at : at + dice.choice((1, 2, 10))]
                case 3:
                    changed[at:at] = changed[at : at + dice.choice((1, 5, 60))]
                case 4:
                    changed = changed[: max(1, at)]
            if not changed:
                changed = bytearray(b"\n")
        right = EITHER
        try:
            if tomllib.loads(changed.decode()) == intact:
                right = ACCEPT
        except (tomllib.TOMLDecodeError, UnicodeDecodeError):
            right = REFUSE
        except (ValueError, RecursionError):
            right = REFUSE
        result.append(Mutant(kind, f"garbled {number}", name, right, bytes(changed)))
    return result


def damaged_binary(kind: str, name: str, data: bytes, count: int, seed: int, right: str = SAME) -> Iterator[Mutant]:
    """Yield a binary file with flipped bits, cut short, with blocks swapped, zeroed or moved."""
    dice = random.Random(f"{kind}{name}{seed}")
    hot = min(len(data), 4096)
    for _ in range(count if data else 0):  # a lock file has nothing to damage
        changed = bytearray(data)
        at = dice.randrange(hot) if dice.random() < 0.5 else dice.randrange(len(data))
        match dice.choice("fffffcszga"):
            case "f":
                changed[at] ^= 1 << dice.randrange(8)
                what = f"a bit of byte {at} flipped"
            case "c":
                del changed[at:]
                what = f"cut to {at} bytes"
            case "s":
                other, size = dice.randrange(len(data)), dice.choice((1, 8, 64, 512))
                here, there = changed[at : at + size], changed[other : other + size]
                changed[other : other + len(here)], changed[at : at + len(there)] = here, there
                what = f"{size} bytes at {at} and {other} swapped"
            case "z":
                size = min(dice.choice((1, 8, 512)), len(data) - at)
                changed[at : at + size] = bytes(size)
                what = f"{size} bytes at {at} zeroed"
            case "g":
                size = min(dice.choice((4, 64)), len(data) - at)
                changed[at : at + size] = dice.randbytes(size)
                what = f"{size} bytes at {at} replaced"
            case _:
                changed[at:at] = dice.randbytes(8)
                what = f"8 bytes put in at {at}"
        yield Mutant(kind, what, name, SAME if bytes(changed) == data else right, bytes(changed))


def loop(path: Path) -> None:
    """Make a link to itself."""
    if not path.is_symlink():
        _loop(path)


NO_FILES: Mapping[str, Callable[[Path], Any]] = {
    "pipe": os.mkfifo,
    "device without an end": lambda path: path.symlink_to("/dev/zero"),
    "device without data": lambda path: path.symlink_to("/dev/null"),
    "sparse terabyte": lambda path: (path.touch(), os.truncate(path, 1 << 40)),
}
"""By name, what to put where a file is expected, and what nobody can read to its end."""


def odd_files(kind: str, name: str, right: str = REFUSE) -> list[Mutant]:
    """Return what is no file, or a file of nothing."""
    made = [
        Mutant(kind, "empty", name, right, b""),
        Mutant(kind, "a zero byte", name, right, b"\0"),
        Mutant(kind, "a link to itself", name, right, make=_loop),
        Mutant(kind, "a folder", name, right, make=Path.mkdir),
        Mutant(kind, "not there", name, right, make=lambda path: None),
        *(Mutant(kind, f"a {what}", name, right, make=make) for what, make in NO_FILES.items()),
    ]
    if name != "records.jsonl":
        return made
    return [mutant for mutant in made if mutant.what != "a folder"]


ODD_LINES = (
    b"{}", b"[]", b"3", b"null", b"true", b'"text"', b"nan", b"NaN", b'{"text": 3}', b'{"text": null}',
    b'{"text": [1]}',
    b'{"text": {"text": "a"}}', b'{"text": "a"', b'{"Text": "a"}', b'{"text": ' + b"9" * 5000 + b"}",
    b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b"\0", b'{"text": "\xed\xa0\x80"}',
)  # fmt: skip


def odd_records(name: str) -> list[Mutant]:
    """Return JSON Lines with a line that is no record with a text."""
    good = b'{"text": "a good line"}\n'
    return [
        Mutant(
            name,
            f"line {_short(line.decode(errors='replace'))}",
            name,
            EITHER if line.endswith(b'\x80"}') else REFUSE,  # half a character becomes a question mark
            good + line + b"\n" + good,
        )
        for line in ODD_LINES
    ]


def odd_json(kind: str, name: str, data: bytes, needed: Sequence[str] = ()) -> list[Mutant]:
    """Return JSON, or JSON Lines, with keys left out, or values of another type."""
    lines = data.decode().splitlines()
    is_lines = name.endswith(".jsonl")
    tree = json.loads(lines[-1] if is_lines else data)
    made = []

    def add(what: str, changed: Any, right: str = EITHER) -> None:
        text = changed if isinstance(changed, str) else json.dumps(changed)
        whole = "\n".join([*lines[:-1], text]) + "\n" if is_lines else text
        made.append(Mutant(kind, what, name, right, whole.encode()))

    for value in ([], 3, None, "x", {}, True, [[[]]]):
        add(f"all is {value!r}", value)
    add("arrays in arrays", "[" * 100_000 + "]" * 100_000)
    add("an integer of 5,000 digits", '{"step": ' + MANY_DIGITS + "}")
    for key in tree:
        add(
            f"no {key}",
            {other: value for other, value in tree.items() if other != key},
            REFUSE if key in needed else EITHER,
        )
        for value in (None, "x", [], {}, -1, 1e400, True, 10**30, "\0"):
            add(f"{key} is {value!r}", tree | {key: value})
    return made


def odd_tables(kind: str, name: str, text: str, count: int, seed: int) -> list[Mutant]:
    """Return CSV files with cells, columns and lines that are wrong."""
    dice, rows = random.Random(f"csv{seed}"), [line.split(",") for line in text.splitlines()]
    header, first = rows[0], rows[1]
    made = [
        Mutant(kind, "intact", name, ACCEPT, text.encode()),
        Mutant(kind, "empty", name, REFUSE, b""),
        Mutant(kind, "the header alone", name, REFUSE, (",".join(header) + "\n").encode()),
        Mutant(kind, "random bytes", name, REFUSE, random.Random(2).randbytes(2000)),
        Mutant(kind, "a zero byte", name, REFUSE, text.encode().replace(b"a,A100-80", b"a\0,A100\0")),
        Mutant(kind, "a cell of 1 MB", name, REFUSE, text.replace("A100-80", "A" * 1_000_000).encode()),
        Mutant(kind, "a folder", name, REFUSE, make=Path.mkdir),
        Mutant(kind, "a link to itself", name, REFUSE, make=_loop),
    ]
    for column in range(1, len(header)):
        for value in ("", "x", "-1", "0", "nan", "inf", "1e400", "9" * 5000, str(HUGE), "1.5", "true"):
            cells = list(first)
            cells[column] = value
            whole = "\n".join([",".join(header), ",".join(cells)]) + "\n"
            number = header[column] not in ("name", "accelerator", "recompute", "stages")
            right = REFUSE if value in ("x", "-1", "nan", "9" * 5000, "true") and number else EITHER
            made.append(Mutant(kind, f"{header[column]} = {_short(value)}", name, right, whole.encode()))
        lacking = [",".join(cell for i, cell in enumerate(row) if i != column) for row in rows]
        made.append(Mutant(kind, f"no column {header[column]}", name, EITHER, ("\n".join(lacking) + "\n").encode()))
    return dice.sample(made, min(len(made), 7 + count * 2))
