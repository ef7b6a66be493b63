"""No control character of a name, a file or a message reaches a terminal."""

import io
import os
import subprocess
import sys

import click
import pytest

from hpctrain.config.terminal import PlainStream, drawing, printable

CODES = "\x1b[2J\x07\r\x00\x7f\x9b\u202e\udcff"
SHOWN = "\\x1b[2J\\x07\\r\\x00\\x7f\\x9b\\u202e\\udcff"


def test_control_characters_are_shown_in_place():
    assert printable(CODES) == SHOWN
    plain = "two lines\nand a\ttab, umlauts äöü, 漢字"
    assert printable(plain) == plain


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_whatever_prints_passes_the_stream(monkeypatch, encoding):
    under = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr(sys, "stdout", PlainStream(under))
    print(f"a{CODES}")
    click.echo(f"b{CODES} €", color=True)
    sys.stdout.writelines([f"c{CODES}\n"])
    assert drawing(sys.stdout) is under
    sys.stdout.flush()
    print("d €", file=drawing(sys.stdout), flush=True)
    written = under.buffer.getvalue().decode("utf-8")  # pyright: ignore[reportAttributeAccessIssue]
    euro = "\\u20ac" if encoding == "latin-1" else "€"
    assert written == f"a{SHOWN}\nb{SHOWN} {euro}\nc{SHOWN}\nd {euro}\n"


def test_a_file_may_have_become_a_pipe_meanwhile(tmp_path):
    """As in a process that was forked from one with other streams."""
    reader, writer = os.pipe()
    with (tmp_path / "before").open("w") as stream:
        assert stream.buffer.seekable()
        os.dup2(writer, stream.fileno())
        os.close(writer)
        print(f"a{CODES}", file=PlainStream(stream))
    assert os.read(reader, 1000).decode() == f"a{SHOWN}\n"
    os.close(reader)


@pytest.fixture
def run(warm_start, tmp_path):
    def run(*arguments: str | bytes) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*warm_start, *arguments], cwd=tmp_path, capture_output=True, timeout=120, text=True)

    return run


@pytest.mark.parametrize("command", [["inspect"], ["plan", "draw"], ["generate"], ["train"]])
def test_names_of_files_do_not_reach_the_terminal(run, command):
    name = os.fsencode("evil\x1b]0;title\x07") + b"\xff.toml"
    done = run(*command, name)
    assert done.returncode in (2, 81, 85, 86), done.stderr
    assert "evil\\x1b]0;title\\x07\\udcff.toml" in done.stderr
    assert "Traceback" not in done.stderr
    assert not {"\x1b", "\x07"} & set(done.stdout + done.stderr)


def test_a_name_in_a_file_does_not_reach_the_terminal(run, tmp_path):
    (tmp_path / "c.toml").write_text('[families."x\\u001b[2J"]\nkind = "cuda"\nmodel = "A100-40\\u0007"\n')
    done = run("inspect", "c.toml")
    assert done.returncode == 83
    assert "x\\x1b[2J" in done.stderr
    assert not {"\x1b", "\x07"} & set(done.stdout + done.stderr)
