"""A slow link between two TUN devices: a process that forwards packets late, and no more of them than a bandwidth allows.

netem does this in the kernel, but it is a module that many machines lack. Run as a script, so that it imports neither torch nor pytest.
"""

import collections
import fcntl
import os
import select
import struct
import sys
import time

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x1, 0x1000
# packets that wait in one direction; more are dropped, as a router does
_QUEUE_PACKETS = 1000


def open_tun(name):
    """The file of a new TUN device, from which the packets of its interface are read. The device ends with the file."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return file


class Direction:
    """The packets on their way from one file to another."""

    def __init__(self, source, target, delay, bandwidth):
        self.source, self.target, self._delay, self._bandwidth = source, target, delay, bandwidth
        self._waiting, self._idle_from = collections.deque(), 0.0

    def receive(self):
        packet = os.read(self.source, 65536)
        if len(self._waiting) < _QUEUE_PACKETS:
            # packets are sent one after the other, and then each is under way for the delay
            self._idle_from = max(self._idle_from, time.monotonic()) + len(packet) / self._bandwidth
            self._waiting.append((self._idle_from + self._delay, packet))

    def deliver(self):
        """Deliver what is due, and return the time at which the next packet is."""
        while self._waiting and self._waiting[0][0] <= time.monotonic():
            os.write(self.target, self._waiting.popleft()[1])
        return self._waiting[0][0] if self._waiting else None


def forward(files, delay, bandwidth):
    """Forward packets both ways without end. `delay` is in seconds one way, `bandwidth` in bytes per second."""
    directions = [Direction(*pair, delay, bandwidth) for pair in (files, files[::-1])]
    while True:
        due = [time_due for direction in directions if (time_due := direction.deliver()) is not None]
        seconds = max(0.0, min(due) - time.monotonic()) if due else None
        ready = select.select([direction.source for direction in directions], [], [], seconds)[0]
        for direction in directions:
            if direction.source in ready:
                direction.receive()


if __name__ == "__main__":
    forward([int(sys.argv[1]), int(sys.argv[2])], float(sys.argv[3]), float(sys.argv[4]))
