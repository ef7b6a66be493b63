"""Progress of lanes: an operation's error is its own."""

import pytest

from hpctrain.comm.progress.instruments import Instruments
from hpctrain.comm.progress.lanes import ProgressEngine, Work
from hpctrain.comm.waiting import Condition, Patience, Phase


def work(progress: ProgressEngine, looks) -> Work:
    """An operation that waits until the next of `looks`, called, says True."""
    looks = iter(looks)

    def steps():
        yield Condition(lambda: next(looks)(), "a look")

    return Work(progress, steps(), Patience(Phase("a test", 5, "a key")), Instruments().start("test", 0))


def fail():
    raise OSError("the network is gone")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("threaded", [True, False])
def test_an_error_while_waiting_ends_that_operation_alone(threaded):
    progress = ProgressEngine(threaded)
    lanes = [progress.add_lane() for _ in range(2)]
    broken = work(progress, [lambda: False, fail])
    sound = work(progress, [lambda: False] * 20 + [lambda: True])
    after = work(progress, [lambda: False, lambda: True])
    for lane, submitted in zip((lanes[0], lanes[1], lanes[0]), (broken, sound, after), strict=True):
        progress.submit(lane, submitted)
    sound.wait()
    with pytest.raises(OSError, match="the network is gone"):
        broken.wait()
    after.wait()
    progress.close()
