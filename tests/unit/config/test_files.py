"""Pipes, devices and sparse terabytes where files are expected: nobody waits for them, and nobody reads them whole."""

import pytest

from benchmarks.mutants import NO_FILES
from hpctrain.checkpoint.convert import import_model
from hpctrain.checkpoint.folder import complete_checkpoints
from hpctrain.checkpoint.resume import choose_checkpoint
from hpctrain.comm.watchdog.flight import read_first_death, read_flights
from hpctrain.config.clusters.cluster_file import load_cluster
from hpctrain.config.errors import HpctrainError
from hpctrain.config.job import load_job
from hpctrain.data.corpus import load_tokenizer, prepare
from hpctrain.data.records import Fields, open_records
from hpctrain.data.tokenizer import Tokenizer
from hpctrain.data.tokens import open_tokens
from hpctrain.jobs.mpirun import _read_hosts
from hpctrain.observe.folder.run_folder import RunFolder, append_line, read_events, read_metrics
from hpctrain.observe.folder.schema import DRIFT, RANKS, read_saved
from hpctrain.plan.file import load_plan
from tests.checkpoints import write_checkpoint
from tests.ranks.small_runs import Alone

pytestmark = pytest.mark.timeout(60)
EACH = pytest.mark.parametrize("make", NO_FILES.values(), ids=NO_FILES)
READERS = {
    "job.toml": lambda path: load_job(str(path)),
    "cluster.toml": load_cluster,
    "plan.toml": load_plan,
    "tokens.h5": open_tokens,
    "tokens.bin": open_tokens,
    "tokenizer.json": load_tokenizer,
    "tokens.json": Tokenizer.load,
    "records.jsonl": lambda path: list(open_records(path, Fields())),
    "config.json": lambda path: import_model(path.parent, path.parent / "out"),
    "hosts": _read_hosts,
    "metrics.jsonl": lambda path: read_metrics(path.parent),
    "drift.json": lambda path: read_saved(path.parent, DRIFT),
}
"""By the name of a file, what reads it and raises an error for people."""


@EACH
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file_is_refused(tmp_path, make, name):
    make(tmp_path / name)
    if name == "metrics.jsonl" and make is not NO_FILES["sparse terabyte"]:
        assert read_metrics(tmp_path) == []  # as without one
        return
    with pytest.raises(HpctrainError, match=name):
        READERS[name](tmp_path / name)


@EACH
def test_a_checkpoint_with_what_is_no_file_falls_back(tmp_path, make):
    run = tmp_path / "run"
    for step in (1, 2):
        write_checkpoint(run, step)
    one, two = complete_checkpoints(run)
    for file in [*sorted(two.iterdir()), run / "checkpoints/latest"]:
        data = file.read_bytes()
        file.unlink()
        make(file)
        checkpoint, lines = choose_checkpoint(Alone(), run, "auto")  # pyright: ignore[reportArgumentType] - one rank
        assert checkpoint == (two if file.name == "latest" else one), file
        assert lines, file
        file.unlink()
        file.write_bytes(data)


@EACH
def test_of_a_run_folder_it_is_left_out(tmp_path, make):
    for name in ("rank-00000.bin", "last-word.json", "events.jsonl", "ranks.json"):
        make(tmp_path / name)
    assert read_flights(tmp_path) == {}
    assert read_first_death(tmp_path) is None
    assert read_events(tmp_path) == []
    with pytest.raises(HpctrainError, match=r"ranks.json: (is damaged|cannot be read)"):
        read_saved(tmp_path, RANKS, 1)


@pytest.mark.parametrize("kind", ["pipe", "device without an end", "device without data"])
def test_nothing_is_written_into_it(tmp_path, kind):
    NO_FILES[kind](tmp_path / "events.jsonl")
    said = []
    RunFolder(tmp_path, said.append).note("start", 0, "text")
    assert "events.jsonl: cannot be written: is no regular file, but a" in said[0]
    append_line(tmp_path / "metrics.jsonl", {"step": 1})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_corpora_are_files(tmp_path):
    NO_FILES["pipe"](tmp_path / "text")
    with pytest.raises(HpctrainError, match="neither a file nor a folder"):
        prepare([tmp_path / "text"], tmp_path / "out.h5")
