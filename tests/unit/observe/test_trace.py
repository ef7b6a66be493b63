"""The trace of a run: what is written, what is summed up, and that it costs nothing where nobody asked for it."""

import contextlib
import json
from types import SimpleNamespace

import pytest

from hpctrain.comm.accelerators.cpu import CpuAccelerator
from hpctrain.comm.probe.clocks import EXCHANGES, offset_to_first
from hpctrain.comm.progress.instruments import UNTRACED, Instruments, Tracer
from hpctrain.comm.progress.operation import Operation
from hpctrain.comm.topology import Place
from hpctrain.comm.waiting import Condition, Patience, Phase
from hpctrain.observe.folder.run_folder import RunFolder
from hpctrain.observe.folder.schema import TRACE_SUMMARY
from hpctrain.observe.folder.spans import COMPUTED, EXPOSED, OVERLAPPED, WAITED, Observed, Span, StepRecorder
from hpctrain.observe.trace import TRACE, RunTrace, format_summary, summarise, write_chrome
from tests.unit.planner.test_predict import plan_of

PLAN = plan_of()
SPANS = [
    Span(COMPUTED, "step 0", 0.0, 10.0),
    Span(COMPUTED, "forward 0", 0.0, 4.0),
    Span(EXPOSED, "all_reduce", 1.0, 2.0, "x", "x 0-1", 100),
    Span(OVERLAPPED, "all_gather", 2.0, 5.0, "z", "z 0-1", 80),
    Span(WAITED, "all_gather", 4.5, 5.0, "z"),
]


def written(folder, ranks) -> list[dict]:
    write_chrome(folder / "trace.json", ranks, [Place(host, "cpu") for host in "ab"[: len(ranks)]])
    return json.loads((folder / "trace.json").read_text())["traceEvents"]


def test_a_rank_is_a_process_and_a_lane_a_thread(tmp_path):
    events = written(tmp_path, [SPANS, SPANS[:1]])
    names = {
        (e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["name"] in ("process_name", "thread_name")
    }
    assert names == {
        (0, None): "rank 0 (cpu on a)",
        (0, 0): "compute",
        (0, 1): "lane z 0-1",
        (1, None): "rank 1 (cpu on b)",
        (1, 0): "compute",
    }
    spans = [(e["pid"], e["tid"], e["cat"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert spans == [
        (0, 0, "compute", "step 0", 0.0, 10e6),
        (0, 0, "compute", "forward 0", 0.0, 4e6),
        (0, 0, "exposed", "x all_reduce", 1e6, 1e6),
        (0, 1, "overlapped", "z all_gather", 2e6, 3e6),
        (0, 0, "waited", "wait for z all_gather", 4.5e6, 0.5e6),
        (1, 0, "compute", "step 0", 0.0, 10e6),
    ]
    assert next(e for e in events if e["name"] == "z all_gather")["args"] == {"bytes": 80}


def test_rounding_leaves_spans_inside_those_around_them(tmp_path):
    third = 1 / 3
    spans = [Span(COMPUTED, "outer", 0.1, 0.1 + 4 * third), Span(COMPUTED, "inner", 0.1 + third, 0.1 + 4 * third)]
    outer, inner = (e for e in written(tmp_path, [spans]) if e["ph"] == "X")
    end = [round(e["ts"] * 1e3) + round(e["dur"] * 1e3) for e in (outer, inner)]
    assert end[0] == end[1]


def test_what_is_hidden_is_what_was_not_waited_for():
    summary = summarise([SPANS, []], num_steps=2)
    assert summary["axes"] == {
        "x": {"communication_seconds": 0.5, "hidden_seconds": 0.0, "exposed_seconds": 0.5, "tensor_bytes": 50},
        "z": {"communication_seconds": 1.5, "hidden_seconds": 1.25, "exposed_seconds": 0.25, "tensor_bytes": 40},
    }
    assert summary["ranks"]["z"] == {0: summary["axes"]["z"]}
    assert ["z", "1500.00", "1250.00", "250.00"] in [line.split() for line in format_summary(summary).splitlines()]
    assert "nothing is communicated" in format_summary(summarise([SPANS[:2]], 1))


def test_a_recorder_keeps_what_happens_since_a_step_began():
    moments = iter([1.0, 5.0, 6.0, 7.0, 8.0])
    recorder = StepRecorder(CpuAccelerator())
    recorder.now = lambda: next(moments)
    recorder.computed("before", 0.0)
    recorder.begin_step()
    recorder.computed("a", 4.0)
    recorder.exposed("x", "x 0-1", "all_reduce", 8, 5.5)
    recorder.computed("step 1", 4.0)
    recorder.waited("x", "all_reduce", 7.5)  # of a validation
    step = [
        Span(COMPUTED, "a", 4.0, 5.0),
        Span(EXPOSED, "all_reduce", 5.5, 6.0, "x", "x 0-1", 8),
        Span(COMPUTED, "step 1", 4.0, 7.0),
    ]
    assert recorder.step_spans == step
    assert recorder.spans == [*step, Span(WAITED, "all_reduce", 7.5, 8.0, "x")]


def test_who_traces_offers_all_that_is_traced():
    text = {name for name in vars(Tracer) if not name.startswith("_")}
    assert text <= {*vars(StepRecorder), "now"} and type(UNTRACED) is Tracer


def test_steps_note_when_they_begin_and_end():
    ready = []

    def waits():
        yield Condition(lambda: bool(ready), "a test")

    operation = Operation(Instruments(tracer=Tracer()), "all_reduce", 0, waits(), Patience(Phase("a test", 5, "a key")))
    assert operation.begun_at == 0.0
    assert not operation.advance()
    assert operation.begun_at > 0.0 and operation.ended_at == 0.0
    ready.append(True)
    assert operation.advance() and operation.begun_at <= operation.ended_at


class PretendedRanks:
    """Rank 1's view of two ranks on two hosts, of which the other's clock is fast and answers with a delay."""

    rank = 1

    def __init__(self, clock, extra_warmup: float, delays):
        self._clock, self._ahead, self._delays = clock, extra_warmup, iter(delays)

    def send(self, value, peer, operation):
        assert peer == 0

    def receive(self, peer, operation):
        there, back = next(self._delays)
        self._clock[0] += there
        answer = self._clock[0] + self._ahead
        self._clock[0] += back
        return answer

    def allgather(self, value, operation):
        return [0.0, value]


def test_the_quickest_answer_tells_how_far_a_clock_is_off(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    delays = [(0.5, 0.1)] * (EXCHANGES - 1) + [(0.01, 0.01)]
    assert offset_to_first(PretendedRanks(clock, 7.0, delays), ["a", "b"]) == pytest.approx(7.0)
    assert offset_to_first(PretendedRanks(clock, 7.0, ()), ["a", "a"]) == 0.0


class Lonely:
    """A world of one rank."""

    rank, size = 0, 1
    topology = SimpleNamespace(places=(Place("a", "cpu"),))

    def largest(self, value):
        return value

    smallest = largest

    hosts = ("a",)
    everybody = SimpleNamespace(rank=0, allgather=lambda value, operation: [value])

    def recorded(self, operation):
        return contextlib.nullcontext()

    def gather_objects(self, value):
        return [value]

    def all_or_none(self):
        return contextlib.nullcontext()


@pytest.mark.parametrize(("most", "expected"), [(1000, 5), (30, 3), (1, 1)])
def test_a_trace_has_no_more_spans_than_can_be_looked_at(tmp_path, monkeypatch, most, expected):
    monkeypatch.setattr("hpctrain.observe.trace.MAX_SPANS", most)
    recorder = StepRecorder(CpuAccelerator())
    trace = RunTrace(Observed(Lonely(), CpuAccelerator(), recorder, PLAN, RunFolder(tmp_path)), num_steps=5)
    assert trace.finish() is None and not list(tmp_path.iterdir())
    said = []
    for step in range(8):
        for _ in range(10):
            recorder.computed(f"step {step}", recorder.now())
        said.append(trace.step_is_done(1.0))
        recorder.begin_step()
    assert [number for number, text in enumerate(said, 1) if text] == [expected]
    assert json.loads((tmp_path / TRACE_SUMMARY.name).read_text())["steps"] == expected


def test_the_trace_of_a_leg_after_another_is_in_its_folder(tmp_path):
    files, recorder = RunFolder(tmp_path), StepRecorder(CpuAccelerator())
    for files.leg in (1, 2):
        files.leg_path.mkdir(parents=True)
        observed = Observed(Lonely(), CpuAccelerator(), recorder, PLAN, files, is_continued=files.leg > 1)
        assert "open it at" in RunTrace(observed, num_steps=1).step_is_done(1.0)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob(TRACE)) == [f"legs/002/{TRACE}", TRACE]


def test_a_trace_that_cannot_be_written_is_reported(tmp_path):
    said, folder = [], tmp_path / "gone"
    files = RunFolder(folder, said.append)
    trace = RunTrace(Observed(Lonely(), CpuAccelerator(), StepRecorder(CpuAccelerator()), PLAN, files), num_steps=1)
    assert "open it at" not in trace.step_is_done(1.0)
    refusal = "cannot be written: No such file or directory; training continues without it"
    assert f"{folder}/trace.json: {refusal}" in said
