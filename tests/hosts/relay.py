"""A stretch of cable between two bridges: passes packets on after they were under way for so long.

    python relay.py NEAR FAR SECONDS

NEAR and FAR are bridges of the network namespace in which it runs. Packets cross whole, as large as TCP hands them to
an interface (TAP devices with offloads): a few thousand a second are a Gbit/s.
"""

import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
TAP, NO_INFORMATION, WITH_HEADER = 0x0002, 0x1000, 0x4000
CHECKSUMS, TCP_OF_4, TCP_OF_6 = 1, 2, 4
LARGEST_PACKET = 1 << 17


def open_tap(name: str, bridge: str) -> int:
    """Return the file of a new TAP device, plugged into a bridge."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", name.encode(), TAP | NO_INFORMATION | WITH_HEADER))
    fcntl.ioctl(file, TUNSETOFFLOAD, CHECKSUMS | TCP_OF_4 | TCP_OF_6)
    for words in (f"link set {name} txqueuelen 20000", f"link set {name} master {bridge}", f"link set {name} up"):
        subprocess.run(["ip", *words.split()], check=True)
    return file


def main(near: str, far: str, seconds: float) -> None:
    files = open_tap("relay-near", near), open_tap("relay-far", far)
    other = dict(zip(files, reversed(files), strict=True))
    under_way: dict[int, deque[tuple[float, bytes]]] = {file: deque() for file in files}
    print("ready", flush=True)
    while True:
        due = min((queue[0][0] for queue in under_way.values() if queue), default=None)
        wait = None if due is None else max(0.0, due - time.monotonic())
        for file in select.select(files, (), (), wait)[0]:
            try:
                while True:
                    packet = os.read(file, LARGEST_PACKET)
                    under_way[other[file]].append((time.monotonic() + seconds, packet))
            except BlockingIOError:
                pass
        now = time.monotonic()
        for file, queue in under_way.items():
            while queue and queue[0][0] <= now:
                os.write(file, queue.popleft()[1])


main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
