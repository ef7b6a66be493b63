"""The flight recorder: what was stored is read back, whatever happens to its writer."""

import signal
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.comm.progress.instruments import Instruments
from hpctrain.comm.watchdog import flight
from hpctrain.comm.watchdog.diagnosis import Evidence, diagnose
from hpctrain.comm.watchdog.flight import (
    claim_last_word,
    parse_flight,
    parse_ranks,
    read_flight,
    read_flights,
    record_path,
)
from hpctrain.comm.watchdog.recorder import Recorder
from hpctrain.config.errors import CommError
from tests.unit.recorded import make_recorders

SOME = st.integers(0, 60)


@given(st.one_of(st.sets(st.integers(0, 5000)), st.sets(SOME), st.builds(range, SOME, SOME, st.integers(1, 9))))
def test_ranks_are_written_so_that_they_can_be_read(ranks):
    assert parse_ranks(flight.write_ranks(ranks)) == tuple(sorted(ranks))


def test_ranks_are_written_in_short():
    assert flight.write_ranks(range(4096)) == "0-4095"
    assert flight.write_ranks(range(3, 4096, 8)) == "3-4091:8"
    assert flight.write_ranks([8, 0, 1, 2, 3]) == "0-3,8"
    assert flight.write_ranks([0, 5]) == "0,5"


@pytest.mark.parametrize("in_file", [True, False])
def test_what_is_recorded_is_read_back(tmp_path, in_file):
    begun = time.time()
    recorder = Recorder(tmp_path / "flight" if in_file else None, 3, 8, "node7", "cpu")
    data, pipeline = recorder.add_group("data", [1, 3, 5, 7]), recorder.add_group("pipeline 3-4", [3, 4])
    recorder.finish(recorder.start(data, "all_reduce", 4_200_000))
    recorder.start(pipeline, "send", 100)
    recorder.finish(recorder.start(pipeline, "receive", 200))
    recorder.start(data, "broadcast", 8)
    read = read_flight(record_path(tmp_path / "flight", 3)) if in_file else recorder.snapshot()
    assert (read.rank, read.size, read.host, read.family, read.state) == (3, 8, "node7", "cpu", flight.RUNNING)
    assert [(o.lane.name, o.sequence, o.name, o.num_bytes, o.peer, o.end is None) for o in read.operations] == [
        ("data", 1, "all_reduce", 4_200_000, -1, False),
        ("pipeline 3-4", 1, "send", 100, 4, True),
        ("pipeline 3-4", 1, "receive", 200, 4, False),
        ("data", 2, "broadcast", 8, -1, True),
    ]
    assert [lane.entered for lane in read.lanes] == [(2, 0, 0), (0, 1, 1)]
    assert read.lanes[0].members == (1, 3, 5, 7)
    assert all(begun <= o.start <= time.time() for o in read.operations)
    assert read.process_is_gone() is False
    recorder.close()
    recorder.close("too late")
    ended = read_flight(record_path(tmp_path / "flight", 3)) if in_file else recorder.snapshot()
    assert (ended.state, ended.error) == (flight.ENDED, "")


def test_the_ring_keeps_the_last_operations_and_all_that_are_in_flight():
    recorder = Recorder(None, 0, 2, "a", "cpu")
    lanes = recorder.add_group("slow", [0, 1]), recorder.add_group("fast", [0, 1])
    handle = recorder.start(lanes[0], "all_reduce", 1)
    for _ in range(3 * flight.RING_SLOTS):
        recorder.finish(recorder.start(lanes[1], "all_reduce", 1))
    read = recorder.snapshot()
    assert len(read.operations) == flight.RING_SLOTS
    assert [o.lane.name for o in read.in_flight] == ["slow"]
    assert max(o.sequence for o in read.operations) == 3 * flight.RING_SLOTS
    assert recorder.max_in_flight()[0] == handle
    assert [o.lane.name for o in read.shortened(2).operations] == ["slow", "fast", "fast"]
    recorder.finish(handle)
    assert recorder.snapshot().in_flight == ()
    assert recorder.max_in_flight() is None


def test_more_in_flight_than_the_ring_holds():
    recorder = Recorder(None, 0, 2, "a", "cpu")
    lane = recorder.add_group("data", [0, 1])
    handles = [recorder.start(lane, "all_reduce", 1) for _ in range(flight.RING_SLOTS + 10)]
    read = recorder.snapshot()
    assert [o.sequence for o in read.in_flight] == list(range(1, flight.RING_SLOTS + 1)), "the oldest are kept"
    assert read.lanes[0].entered[0] == len(handles)
    assert recorder.max_in_flight()[0] == handles[0]
    for handle in handles[flight.RING_SLOTS :]:
        recorder.finish(handle)
    assert len(recorder.snapshot().in_flight) == flight.RING_SLOTS, "an end without a slot ends no other operation"
    for handle in handles[: flight.RING_SLOTS]:
        recorder.finish(handle)
    assert recorder.snapshot().in_flight == ()
    assert recorder.max_in_flight() is None


def test_two_threads_record_at_once():
    recorder = Recorder(None, 0, 2, "a", "cpu")
    lanes = [recorder.add_group(name, [0, 1]) for name in "xy"]

    def work(lane):
        for _ in range(3000):
            recorder.finish(recorder.start(lane, "all_reduce", lane))

    threads = [threading.Thread(target=work, args=(lane,)) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    read = recorder.snapshot()
    assert [lane.entered[0] for lane in read.lanes] == [3000, 3000]
    assert read.in_flight == ()
    for number in lanes:
        own = [o.sequence for o in read.operations if o.lane.number == number]
        assert own == sorted(set(own))


def test_many_large_groups_do_not_overflow_the_table():
    recorder = Recorder(None, 0, 4096, "a", "cpu")
    ragged = [rank for rank in range(4096) if (rank * rank) % 7 == 1]
    numbers = [recorder.add_group(f"ragged {i}", ragged) for i in range(100)]
    recorder.finish(recorder.start(numbers[0], "all_reduce", 1))
    recorder.start(numbers[-1], "all_reduce", 1)
    read = recorder.snapshot()
    assert 10 < len(read.lanes) < 100
    assert read.lanes[0].num_ranks == len(ragged)
    assert set(read.lanes[0].members) < set(ragged)
    assert [o.lane.name for o in read.operations] == ["ragged 0", "99"]


def test_legs_have_the_lanes_of_those_before():
    """Lanes of a hundred legs have names and counters, the same key on all ranks, and a late rank is behind."""
    recorders = [Recorder(None, rank, 2, "a", "cpu") for rank in range(2)]

    def begin(recorder: Recorder) -> list[Instruments]:
        order = ("x", "pipeline", "pipeline") if recorder.rank else ("pipeline", "x", "pipeline")
        return [Instruments(recorder, name, [0, 1]) for name in order]

    for _ in range(100):
        for recorder in recorders:
            for lane in begin(recorder):
                recorder.finish(recorder.start(lane.group, "all_reduce", 1))
                lane.close()
                lane.close()
    begun = [begin(recorder) for recorder in recorders]
    reads = [recorder.snapshot() for recorder in recorders]
    for read in reads:
        assert sorted((lane.name, lane.occurrence) for lane in read.lanes) == [
            ("pipeline", 0),
            ("pipeline", 1),
            ("x", 0),
        ]
        assert {lane.entered[0] for lane in read.lanes} == {100}
    keys = [[read.lanes[each.group].key for each in of_rank] for read, of_rank in zip(reads, begun, strict=True)]
    assert keys[0][1] == keys[1][0] and [keys[0][0], keys[0][2]] == keys[1][1:]
    recorders[0].start(begun[0][1].group, "all_reduce", 1)
    found = diagnose(Evidence({read.rank: read for read in (each.snapshot() for each in recorders)}, 2, time.time()))
    assert found.culprits == (1,)


def test_lanes_that_a_rank_left_alone_are_used_no_more():
    recorder = Recorder(None, 0, 2, "a", "cpu")
    left = Instruments(recorder, "x", [0, 1])
    left.close(alone=True)
    left.close()
    assert Instruments(recorder, "x", [0, 1]).group != left.group, "others may have entered more of its operations"


def test_a_lane_with_a_number_beyond_those_of_slots_is_recorded_without_its_name():
    recorder = Recorder(None, 0, 2, "a", "cpu")
    numbers = [recorder.add_group(f"{number}", [0, 1]) for number in range(flight.LAST_LANE + 3)]
    recorder.start(numbers[-1], "all_reduce", 1)
    (operation,) = recorder.snapshot().in_flight
    assert operation.lane.name == f"{flight.LAST_LANE}"


def test_a_record_moves_into_its_folder_and_old_ones_go(tmp_path):
    for recorder in make_recorders(3, tmp_path, attempt=1):
        recorder.close()
    (tmp_path / "stacks-00001.txt").write_text("old")
    assert claim_last_word(tmp_path, {"rank": 1, "time": 1.0})
    assert not claim_last_word(tmp_path, {})
    first, second = (Recorder(None, rank, 2, "a", "cpu", attempt=2) for rank in range(2))
    lane = first.add_group("data", [0, 1])
    handle = first.start(lane, "all_reduce", 1)
    first.move_to(tmp_path)
    first.finish(handle)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-00000.bin", "rank-00001.bin"]
    assert set(read_flights(tmp_path)) == {0}, "rank 1's is of an earlier attempt"
    second.move_to(tmp_path)
    read = read_flights(tmp_path)
    assert set(read) == {0, 1}
    assert [(o.name, o.end is None) for o in read[0].operations] == [("all_reduce", False)]


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "flight").write_text("a file")
    with pytest.raises(CommError, match="rank-00000.bin: the flight recorder cannot write: .*choose another run"):
        Recorder(tmp_path / "flight", 0, 1, "a", "cpu")


def small_record() -> bytes:
    recorder = Recorder(None, 1, 4, "a", "cpu")
    lane = recorder.add_group("data", range(4))
    for _ in range(5):
        recorder.finish(recorder.start(lane, "all_reduce", 7))
    recorder.start(lane, "broadcast", 7)
    return recorder._memory[:]


RECORD = small_record()
INTERESTING = st.one_of(st.integers(0, 2000), st.integers(flight.TABLE_AT, flight.TABLE_AT + 120))


@given(st.lists(st.tuples(INTERESTING, st.integers(0, 255))), st.integers(0, flight.TOTAL_BYTES))
def test_a_damaged_or_short_record_is_read_as_far_as_it_goes(changes, length):
    data = bytearray(RECORD)
    for at, value in changes:
        data[at] = value
    try:
        read = parse_flight(bytes(data[:length]))
    except CommError:
        return
    diagnose(Evidence({read.rank: read}, 4, time.time()))


def test_a_slot_that_was_not_written_to_its_end_is_left_out():
    data = bytearray(RECORD)
    at = flight.RING_AT + 6 * flight.SLOT.size  # the slot of the broadcast
    data[at : at + 8] = (6 + flight.RING_SLOTS).to_bytes(8, sys.byteorder)
    assert [o.name for o in parse_flight(bytes(data)).operations] == ["all_reduce"] * 5
    with pytest.raises(CommError, match="not a flight record"):
        parse_flight(b"something else")


CHILD = """
import sys, time
from pathlib import Path
from hpctrain.comm.watchdog.recorder import Recorder
recorder = Recorder(Path(sys.argv[1]), 0, 1, "a", "cpu")
lane = recorder.add_group("data", [0, 1])
count = 0
while True:
    handle = recorder.start(lane, "all_reduce", 8)
    count += 1
    if count == 1000:
        print("recording", flush=True)
    recorder.finish(handle)
"""


def test_the_record_of_a_killed_process_is_read(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", CHILD, tmp_path], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"recording\n"
    path = record_path(tmp_path, 0)
    assert read_flight(path).process_is_gone() is False
    process.send_signal(signal.SIGKILL)
    process.communicate()
    read = read_flight(path)
    assert read.state == flight.RUNNING
    assert read.process_is_gone() is True
    assert read.pid == process.pid
    sequences = [operation.sequence for operation in read.operations]
    assert len(sequences) >= flight.RING_SLOTS - 1  # the last one may be torn
    assert sequences == list(range(sequences[0], sequences[0] + len(sequences)))
    assert abs(read.lanes[0].entered[0] - sequences[-1]) <= 1
