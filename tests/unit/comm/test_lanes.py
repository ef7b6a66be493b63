"""Operations: their order, who waits for them, and what is left of them. An operation's error is its own."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from hpctrain.comm.collectives.flat import SilentCollectives
from hpctrain.comm.collectives.streamed import StreamedCollectives
from hpctrain.comm.groups.group import Backend, Group
from hpctrain.comm.progress.instruments import Instruments
from hpctrain.comm.progress.lanes import ProgressEngine
from hpctrain.comm.progress.operation import Operation
from hpctrain.comm.waiting import Condition, Patience, Phase
from hpctrain.comm.watchdog.recorder import Recorder
from hpctrain.config.errors import CommError

SOON = Patience(Phase("a test", 5, "a key"))


def operation(looks) -> Operation:
    """An operation that waits until the next of `looks`, called, says True."""
    looks = iter(looks)

    def steps():
        yield Condition(lambda: next(looks)(), "a look")

    return Operation(Instruments(), "test", 0, steps(), SOON, is_overlapped=True)


def fail():
    raise OSError("the network is gone")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("threaded", [True, False])
def test_an_error_while_waiting_ends_that_operation_alone(threaded):
    progress = ProgressEngine(threaded)
    lanes = [progress.add_lane() for _ in range(2)]
    broken = operation([lambda: False, fail])
    sound = operation([lambda: False] * 20 + [lambda: True])
    after = operation([lambda: False, lambda: True])
    for lane, begun in zip((lanes[0], lanes[1], lanes[0]), (broken, sound, after), strict=True):
        lane.begin(begun)
    sound.wait()
    with pytest.raises(OSError, match="the network is gone"):
        broken.wait()
    after.wait()
    progress.close()


def test_an_operation_is_waited_for_once():
    lane = ProgressEngine(threaded=False).add_lane()
    blocking, started = operation([lambda: True]), operation([lambda: False, lambda: True])
    lane.begin(started)
    for each in (blocking, started):
        each.wait()
        each.finish()  # who orders operations may come later
        with pytest.raises(AssertionError, match="a second wait for one test of group"):
            each.wait()


def test_operations_of_a_lane_begin_in_the_order_of_the_calls():
    order, gate = [], []
    lane = ProgressEngine(threaded=False).add_lane()

    def steps(name: str):
        order.append(name)
        yield Condition(lambda: bool(gate), "a gate")

    names = ("first", "second", "third")
    started = [Operation(Instruments(), name, 0, steps(name), SOON, is_overlapped=True) for name in names]
    for each in started:
        lane.begin(each)
    assert order == ["first"], "what is behind another one has not begun"
    gate.append(True)
    started[2].wait()
    assert order == [*names] and all(each.ended for each in started)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("threaded", [True, False])
def test_who_waits_for_an_abandoned_operation_is_told_and_closing_waits_for_nobody(threaded):
    progress = ProgressEngine(threaded)
    left, other = progress.add_lane(), progress.add_lane()
    group = Group([0], lane=left)
    in_flight = [operation([lambda: False] * 10**6) for _ in range(2)]
    for each in in_flight:
        left.begin(each)
    sound = operation([lambda: False, lambda: True])
    other.begin(sound)
    group.abandon()
    for each in in_flight:
        assert each.ended
        with pytest.raises(CommError, match="test of group was abandoned while it was in flight"):
            each.wait()
    sound.wait()
    group.close()
    assert progress._lanes == [other] and len(progress.kept) == len(in_flight), "MPI may still write into tensors"
    other.close()
    assert progress._lanes == [], "a closed lane is polled no more"
    progress.finish()
    progress.close()


def test_an_abandoned_operation_is_watched_no_more_and_has_not_ended_in_the_flight_record():
    recorder = Recorder(None, 0, 2, "a", "cpu")
    patience = Patience(Phase("a test", 1.0, ""))
    left = Operation(
        Instruments(recorder, "data", [0, 1]), "all_reduce", 1, iter([Condition(lambda: False, "a gate")]), patience
    )
    assert not left.advance() and recorder.max_in_flight() is not None
    left.abandon()
    assert recorder.max_in_flight() is None and len(recorder.snapshot().in_flight) == 1
    recorder.finish(recorder.start(0, "all_reduce", 1))
    read = recorder.snapshot()
    assert read.in_flight == (), "the rank goes on"
    assert [(o.end is None, o.abandoned is None) for o in read.operations] == [(True, False), (False, True)]


@pytest.mark.parametrize("error", [CommError, KeyboardInterrupt])
def test_tensors_of_a_blocking_call_that_failed_are_kept(error):
    class Failing(SilentCollectives):
        def all_reduce(self, flat, op):
            def fail():
                raise error("a test")

            yield Condition(fail, "a gate")

    recorder, kept = Recorder(None, 0, 2, "a", "cpu"), []
    backend, instruments = Backend(Failing(0, 2), None, "a test", kept=kept), Instruments(recorder, "data", [0, 1])
    group, tensor = Group([0, 1], backend, SOON, instruments), torch.ones(3)
    written = weakref.ref(tensor)
    with pytest.raises(error, match="a test"):
        group.all_reduce(tensor)
    del group, backend, tensor
    gc.collect()
    assert written() is not None, "MPI may still write into it"
    assert recorder.max_in_flight() is None
    kept.clear()
    gc.collect()
    assert written() is None


@pytest.mark.parametrize("is_started", [False, True])
@pytest.mark.parametrize("in_sum", [False, True])
def test_tensors_and_scratch_of_steps_that_failed_are_kept(in_sum, is_started):
    """A test of MPI fails, or a sum is out of memory, while other receives are posted."""
    gate, written = [], []

    class Failing(SilentCollectives):
        def all_reduce(self, flat, op):
            scratch = flat.clone()
            written.append(weakref.ref(scratch))
            yield Condition(lambda: bool(gate), "a gate")
            if not in_sum:
                yield Condition(fail, "a message")
            self._sum(scratch)

        def _sum(self, parts):
            total = parts.clone()
            written.append(weakref.ref(total))
            fail()

    kept = []
    engine = ProgressEngine(threaded=False)
    backend = Backend(Failing(0, 2), None, "a test", kept=kept)
    group, tensor = Group([0, 1], backend, SOON, lane=engine.add_lane() if is_started else None), torch.ones(3)
    written.append(weakref.ref(tensor))
    gate += [] if is_started else [True]
    with pytest.raises(OSError, match="the network is gone"):
        operation = group.start_all_reduce(tensor)
        gate.append(True)
        operation.wait()
    operation = None
    group.abandon()
    del group, backend, tensor
    gc.collect()
    assert len(written) == 2 + in_sum and all(each() is not None for each in written), "MPI may still write into them"
    kept.clear()
    engine.kept.clear()
    gc.collect()
    assert not any(each() is not None for each in written), "and nothing else keeps them"


def test_a_launch_that_failed_is_in_flight_no_more():
    def refuse(operation, lane):
        raise CommError("the library refused it")

    class Launched(StreamedCollectives):
        def __init__(self):
            self.rank, self.size, self.name, self.is_launched = 0, 2, "a test", True

        def launches_of(self, tensor):
            return SimpleNamespace(accelerator=None, begin=refuse)

        def steps(self, operation, flat, *arguments):
            return iter(())

    recorder, kept = Recorder(None, 0, 2, "a", "cpu"), []
    backend = Backend(Launched(), None, "a test", kept=kept)
    group = Group([0, 1], backend, SOON, Instruments(recorder, "data", [0, 1]))
    for call in (group.all_reduce, group.start_all_reduce):
        with pytest.raises(CommError, match="the library refused it"):
            call(torch.ones(3))
    assert recorder.max_in_flight() is None and len(kept) == 2


def test_a_blocking_call_begins_when_what_was_started_has_ended():
    order, gate = [], []

    class Noting(SilentCollectives):
        def all_reduce(self, flat, op):
            order.append(f"{flat.item():g} begins")
            yield Condition(lambda: bool(gate), "a gate")
            order.append(f"{flat.item():g} ends")

    lane = ProgressEngine(threaded=False).add_lane()
    group = Group([0, 1], Backend(Noting(0, 2), None, "a test"), SOON, lane=lane)
    started = group.start_all_reduce(torch.tensor([1.0]))
    gate.append(True)
    group.all_reduce(torch.tensor([2.0]))
    assert order == ["1 begins", "1 ends", "2 begins", "2 ends"]
    started.wait()


@pytest.mark.parametrize("moves_all", [True, False])
def test_messages_of_a_channel_are_posted_while_others_are_under_way(moves_all):
    """A relay holds what was posted: on a lane that moves all, three messages are under way together."""
    lane, held = ProgressEngine(threaded=False).add_lane(moves_all), []

    def posting(number):
        def steps():
            held.append(number)
            yield Condition(lambda: number not in held, "the relay to let it go")

        return Operation(Instruments(), "send", 0, steps(), SOON, is_overlapped=True)

    messages = [posting(number) for number in range(3)]
    for message in messages:
        lane.begin(message)
    assert held == ([0, 1, 2] if moves_all else [0]), "in their order"
    if moves_all:
        held.remove(1)
        assert messages[1].done() and not messages[0].done()
    while held:
        held.remove(held[0])
        lane.advance()
    for message in messages:
        message.wait()
    assert not lane.queue
