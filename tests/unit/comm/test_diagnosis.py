"""The rank that the others wait for is identified and named, from flight records alone."""

import dataclasses
import time

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.comm.watchdog import flight
from hpctrain.comm.watchdog.diagnosis import Evidence, detect_waits, diagnose, post_mortem
from hpctrain.comm.watchdog.flight import claim_last_word, record_path
from hpctrain.comm.watchdog.recorder import Recorder
from tests.unit.recorded import everywhere, evidence_of, make_recorders


def test_the_rank_that_has_not_entered_is_named():
    recorders = make_recorders(4)
    everyone, data = everywhere(recorders, "everyone"), everywhere(recorders, "data")
    for recorder in recorders:
        for _ in range(3):
            recorder.finish(recorder.start(everyone, "broadcast", 8))
        for _ in range(16):
            recorder.finish(recorder.start(data, "all_reduce", 4_200_000))
    recorders[2].finish(recorders[2].start(everyone, "broadcast", 8))
    for rank in (0, 1, 3):
        recorders[rank].start(data, "all_reduce", 4_200_000)
    result = diagnose(dataclasses.replace(evidence_of(recorders), now=time.time() + 12.4))
    assert result.culprits == (2,)
    assert result.sentences == (
        "rank 2 (host a) has not entered all_reduce number 17 on lane data [0-3], 4.2 MB; its last was"
        " broadcast number 4 on lane everyone [0-3], 8 bytes, finished 12.4 s ago; 3 ranks wait for it",
    )
    assert result.table[0].startswith(
        "rank 0 (host a)  waits  all_reduce 17 on data, 4.2 MB, begun 12.4 s ago | all_red"
    )
    assert result.table[2].startswith("rank 2 (host a)  works  broadcast 4 on everyone, 8 bytes, done 12.4 s ago | ")


def test_several_ranks_are_missing_and_one_is_gone():
    recorders = make_recorders(6)
    lane = everywhere(recorders, "data")
    for recorder in recorders[:4]:
        recorder.start(lane, "barrier", 0)
    result = diagnose(evidence_of(recorders))
    assert result.culprits == (4, 5)
    assert result.sentences[0].startswith(
        "ranks 4-5 (hosts a, b) have not entered barrier number 1 on lane data [0-5]; "
    )
    assert "rank 4 has recorded no operation; 4 ranks wait for them" in result.sentences[0]
    result = diagnose(evidence_of(recorders, gone=frozenset({5})))
    assert result.culprits == (5,)
    assert "rank 5 (host b) is gone: its process ended without a word; has not entered barrier" in result.sentences[0]
    result = diagnose(evidence_of(recorders[:5], silent=frozenset({5}), hosts=list("abcdef")))
    assert result.sentences[0].startswith("rank 5 (host f) does not answer: it is gone, or stuck in a call that holds")


def test_another_operation_under_the_same_number():
    recorders = make_recorders(4)
    lane = everywhere(recorders, "data")
    for recorder in recorders:
        recorder.start(lane, "broadcast" if recorder.rank == 0 else "all_reduce", 8)
    result = diagnose(evidence_of(recorders))
    assert result.culprits == (0,)
    assert result.sentences[0] == (
        "rank 0 (host a) entered broadcast number 1 on lane data [0-3], 8 bytes,"
        " where others of the lane entered all_reduce, 8 bytes"
    )


def test_another_size_and_an_operation_that_went_through_where_others_wait():
    recorders = make_recorders(3)
    lane = everywhere(recorders, "data")
    recorders[0].start(lane, "all_reduce", 16)
    recorders[1].start(lane, "all_reduce", 16)
    recorders[2].finish(recorders[2].start(lane, "all_reduce", 8))
    assert "rank 2 (host a) entered all_reduce number 1" in diagnose(evidence_of(recorders)).sentences[0]
    recorders = make_recorders(2)
    lane = everywhere(recorders, "data")
    for recorder in recorders:  # uneven cuts: all_gather's sizes may differ
        recorder.start(lane, "all_gather", 8 * recorder.rank)
    assert (
        "nobody is missing there, the transfer itself makes no progress"
        in diagnose(evidence_of(recorders)).sentences[0]
    )


def test_the_end_of_a_chain_is_named_and_a_circle_as_such():
    recorders = make_recorders(3)
    lanes = {pair: [recorders[r].add_group(f"pipeline {pair}", pair) for r in pair] for pair in ((0, 1), (1, 2))}
    recorders[0].start(lanes[0, 1][0], "receive", 8)
    recorders[1].start(lanes[1, 2][0], "receive", 8)
    result = diagnose(evidence_of(recorders))
    assert result.culprits == (2,)
    assert "has not entered the send for receive number 1 from 2 on lane pipeline (1, 2) [1-2]" in result.sentences[0]
    assert result.sentences[0].endswith("rank 1 (host b) waits for it")
    recorders[2].start(lanes[1, 2][1], "receive", 8)
    result = diagnose(evidence_of(recorders))
    assert result.culprits == (1, 2)
    assert result.sentences[0].startswith("ranks wait for each other: ")


def test_a_message_that_the_ring_has_forgotten_is_not_missing():
    recorders = make_recorders(2)
    pipeline, data = everywhere(recorders, "pipeline 0-1"), everywhere(recorders, "data")
    recorders[1].finish(recorders[1].start(pipeline, "send", 8))
    for _ in range(2 * flight.RING_SLOTS):
        recorders[1].finish(recorders[1].start(data, "all_reduce", 8))
    recorders[0].start(pipeline, "receive", 8)
    assert [wait.missing for wait in detect_waits(evidence_of(recorders).flights)] == [()]
    recorders[0].start(data, "all_reduce", 8)  # and of what it has finished it is not missing either
    assert [wait.missing for wait in detect_waits(evidence_of(recorders).flights)] == [(), ()]


def test_lanes_of_one_name_are_distinguished_by_the_order_in_which_they_were_made():
    recorders = make_recorders(2)
    first, second = everywhere(recorders, "data"), everywhere(recorders, "data")
    recorders[0].start(first, "all_reduce", 8)
    recorders[1].start(second, "all_reduce", 8)
    assert [wait.missing for wait in detect_waits(evidence_of(recorders).flights)] == [(1,), (0,)]


LANES = st.lists(st.sets(st.integers(0, 4), min_size=2).map(sorted).map(tuple), min_size=1, max_size=4, unique=True)


@given(LANES, st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=30), st.integers(0, 4), st.integers(0, 10))
def test_the_rank_that_stopped_is_always_identified(lanes, program, stopped, after):
    """Ranks go through one order of operations, as far as they get after one of them has stopped."""
    recorders = make_recorders(5)
    numbers = {(rank, lane): recorders[rank].add_group("lane", lane) for lane in lanes for rank in lane}
    pairs = sorted({lane[:2] for lane in lanes})  # messages have lanes of two ranks
    numbers |= {(rank, "pair", pair): recorders[rank].add_group("pair", pair) for pair in pairs for rank in pair}
    todo: list[list[tuple]] = [[] for _ in recorders]
    for i, (choice, is_message) in enumerate(program):
        lane = lanes[choice % len(lanes)]
        for rank in lane[:2] if is_message else lane:
            todo[rank].append((i, lane, is_message))
    del todo[stopped][after:]
    inside: dict[int, dict[int, int]] = {}
    blocked: dict[int, int] = {}
    moved = True
    while moved:
        moved = False
        for rank, recorder in enumerate(recorders):
            if rank in blocked or not todo[rank]:
                continue
            i, lane, is_message = todo[rank].pop(0)
            moved = True
            name = ("send" if rank == lane[0] else "receive") if is_message else "all_reduce"
            number = numbers[rank, "pair", lane[:2]] if is_message else numbers[rank, lane]
            inside.setdefault(i, {})[rank] = recorder.start(number, name, 8)
            if name == "send":
                recorder.finish(inside[i][rank])
            else:
                blocked[rank] = i
            if len(inside[i]) == (2 if is_message else len(lane)):
                for other, handle in inside[i].items():
                    if blocked.get(other) == i:  # who sent has continued, and may wait in something else
                        recorders[other].finish(handle)
                        del blocked[other]
    result = diagnose(evidence_of(recorders))
    assert result.culprits == ((stopped,) if blocked else ())


def test_thousands_of_ranks_take_seconds_at_most():
    recorders = [Recorder(None, rank, 2048, f"node{rank // 8}", "cpu") for rank in range(2048)]
    lane = everywhere(recorders, "everyone")
    for recorder in recorders:
        if recorder.rank != 1999:
            recorder.start(lane, "all_reduce", 8)
    flights = {r.rank: r.snapshot() for r in recorders}
    start = time.process_time()
    result = diagnose(Evidence(flights, 2048, time.time()))
    assert time.process_time() - start < 5
    assert result.culprits == (1999,)
    assert "2047 ranks wait for it" in result.sentences[0]
    assert len(result.table) == 33
    assert any(line.startswith("rank 1999 (host node249)") for line in result.table)


def dead(path):
    """Make a record look like that of a process that has gone."""
    data = bytearray(path.read_bytes())
    fields = list(flight.HEADER.unpack_from(data))
    fields[5] += 1  # the process with this id began at another time
    flight.HEADER.pack_into(data, 0, *fields)
    path.write_bytes(data)


def test_nothing_is_said_of_a_run_that_ended_in_order_or_left_no_records(tmp_path):
    assert post_mortem(tmp_path / "none", time.time()) is None
    recorders = make_recorders(2, tmp_path)
    for recorder in recorders:
        recorder.close()
    assert post_mortem(tmp_path, time.time()) is None


def test_a_run_that_still_trains_is_reported_as_such(tmp_path):
    recorders = make_recorders(2, tmp_path)
    lane = everywhere(recorders, "data")
    recorders[0].start(lane, "all_reduce", 8)
    state, result = post_mortem(tmp_path, time.time())
    assert (state, result.sentences) == ("in flight, 2 ranks", ("no rank waited for another one",))
    state, result = post_mortem(tmp_path, time.time() + 60)
    assert result.culprits == (1,)
    dead(record_path(tmp_path, 1))
    state, result = post_mortem(tmp_path, time.time())
    assert state == "not ended in order, 2 ranks"
    assert result.sentences[0].startswith("rank 1 (host b) is gone")


def test_who_died_first_and_who_reported_an_error(tmp_path):
    recorders = make_recorders(3, tmp_path)
    lane = everywhere(recorders, "data")
    for recorder in recorders:
        recorder.finish(recorder.start(lane, "all_reduce", 8))
        dead(record_path(tmp_path, recorder.rank))
    state, result = post_mortem(tmp_path, time.time())
    assert (state, result.sentences) == ("not ended in order, 3 ranks", ("no rank waited for another one",))
    assert claim_last_word(tmp_path, {"rank": 1, "time": time.time()})
    state, result = post_mortem(tmp_path, time.time())
    assert result.culprits == (1,)
    assert result.sentences[0].startswith("rank 1 (host b) was killed or crashed, the first to end without a word; its")
    assert "rank 1 (host b)  died first  all_reduce 1 on data, 8 bytes, done " in result.table[1]
    recorders = make_recorders(3, tmp_path, attempt=2)
    recorders[2].close("TrainingError: the loss is not a number")
    _, result = post_mortem(tmp_path, time.time())
    assert result.sentences == ("rank 2 (host a) reported: TrainingError: the loss is not a number",)
