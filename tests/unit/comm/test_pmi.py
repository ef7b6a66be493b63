"""The limit of a value between MPICH and Slurm."""

import os
import socket
import threading
import time

from hpctrain.comm.start.pmi import short_values

ANSWER = b"cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=%d\n"


def test_a_rank_gets_a_limit_that_fits_the_line():
    ours, launcher = socket.socketpair()
    stream = ours.fileno()

    def answer() -> None:
        for limit in (1024, 100):
            assert launcher.recv(100) == b"cmd=get_maxes\n"
            text = ANSWER % limit
            launcher.sendall(text[:50])
            time.sleep(0.05)
            launcher.sendall(text[50:])

    thread = threading.Thread(target=answer)
    thread.start()
    with short_values(stream):
        for limit in (1024 - 128, 100):
            os.write(stream, b"cmd=get_maxes\n")
            assert os.read(stream, 1000) == ANSWER % limit
    thread.join()
    os.write(stream, b"cmd=finalize\n")
    assert launcher.recv(100) == b"cmd=finalize\n"
    launcher.sendall(ANSWER % 1024)
    assert os.read(stream, 1000) == ANSWER % 1024
    launcher.close()
    ours.close()


def test_what_else_is_said_passes_as_it_is():
    ours, launcher = socket.socketpair()
    put = b"cmd=put kvsname=3.0 key=k value=" + b"A5" * 400 + b"\n"
    with short_values(ours.fileno()):
        os.write(ours.fileno(), put)
        assert launcher.recv(4096) == put
        launcher.sendall(b"cmd=put_result rc=0\ncmd=barrier_out rc=0\n")
        time.sleep(0.05)
        assert os.read(ours.fileno(), 1000) == b"cmd=put_result rc=0\ncmd=barrier_out rc=0\n"
    launcher.close()
    ours.close()
