"""Two hosts on one machine: network namespaces, which share no interface, joined by a link that can be slow and can be cut."""

import contextlib
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

from slow_link import open_tun

INTERFACE, ADDRESSES = "link0", ("10.99.0.1", "10.99.0.2")
_TUN = Path("/dev/net/tun")


class Unavailable(Exception):
    """What this machine does not have or allow."""


def run_ip(*args):
    try:
        done = subprocess.run(["ip", *args], capture_output=True, text=True, timeout=30)
    except FileNotFoundError as error:
        raise Unavailable("`ip` of iproute2 is not installed") from error
    if done.returncode:
        raise Unavailable(f"`ip {' '.join(args)}` failed: {done.stderr.strip()}")
    return done.stdout


class Hosts:
    """Two namespaces and what runs in them. `close` ends all of it, however far the start came."""

    def __init__(self, name):
        self.names = [f"polyhead-{os.getpid()}-{name}-{i}" for i in range(2)]
        self.processes, self._undo = [], contextlib.ExitStack()

    def start(self):
        for name in self.names:
            run_ip("netns", "add", name)
            self._undo.callback(self._remove, name)
            run_ip("-n", name, "link", "set", "lo", "up")

    def join(self):
        """Join the hosts by a pair of veth devices, as fast as the machine."""
        first, second = self.names
        run_ip("-n", first, "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", second)
        self._set_up()

    def join_slowly(self, delay, bandwidth):
        """Join the hosts by a link with a delay in seconds, one way, and a bandwidth in bytes per second."""
        make_tun_device()
        files = []
        for i, name in enumerate(self.names):
            # it is made here and moved: names on this host must be unique, and have 15 characters at most
            device = f"ph{os.getpid()}-{i}"
            files.append(open_tun(device))
            self._undo.callback(os.close, files[-1])
            run_ip("link", "set", device, "netns", name, "name", INTERFACE)
        # first both interfaces: a packet for one that is down would be an error
        self._set_up()
        script = Path(__file__).with_name("slow_link.py")
        relay = subprocess.Popen([sys.executable, script, *map(str, [*files, delay, bandwidth])], pass_fds=files)
        self._undo.callback(end, relay)

    def _set_up(self):
        for name, own, other in zip(self.names, ADDRESSES, ADDRESSES[::-1], strict=True):
            run_ip("-n", name, "address", "add", own, "peer", other, "dev", INTERFACE)
            run_ip("-n", name, "link", "set", INTERFACE, "up")

    def run(self, host, command, env, output):
        """Start a command on a host; its output goes to a file."""
        with output.open("wb") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.names[host], *command], env=env, stdout=file, stderr=subprocess.STDOUT
            )
        self._undo.callback(end, process)
        self.processes.append(process)

    def cut(self):
        """Cut the link: one end goes down, and no packet of the other arrives. Return the time at which it happened."""
        run_ip("-n", self.names[1], "link", "set", INTERFACE, "down")
        return time.monotonic()

    def _remove(self, name):
        # also processes that others started in the namespace, such as torchrun's workers
        for pid in run_ip("netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        run_ip("netns", "delete", name)

    def close(self):
        self._undo.close()


def end(process):
    process.kill()
    process.wait()


def make_tun_device():
    """Make /dev/net/tun where a container has none."""
    try:
        if not _TUN.exists():
            _TUN.parent.mkdir(exist_ok=True)
            os.mknod(_TUN, stat.S_IFCHR | 0o600, os.makedev(10, 200))
        os.close(os.open(_TUN, os.O_RDWR))
    except OSError as error:
        raise Unavailable(f"there is no TUN device: {error}") from error
