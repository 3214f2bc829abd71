"""What is read of processes is what they do."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from meshwise.executor.launch.processes import is_stopped
from tests.host_processes import find_listeners, is_alive, list_children, parse_address

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1"])
def test_listening_sockets_of_these_processes(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    before = find_listeners([os.getpid()])  # what other tests of this process have left
    with socket.socket(family) as server:
        server.bind((address, 0))
        own = (address, server.getsockname()[1])
        assert own not in find_listeners([os.getpid()])
        server.listen()
        assert find_listeners([os.getpid()]) - before == {own}
        assert own not in find_listeners([os.getppid()])
    assert own not in find_listeners([os.getpid()])


def test_addresses_of_the_kernel() -> None:
    # 2001:db8::1 is 20010DB8 00000000 00000000 00000001, each word in the order of the machine
    words = [0x20010DB8, 0, 0, 1]
    text = "".join(f"{int.from_bytes(word.to_bytes(4, 'big'), sys.byteorder):08X}" for word in words)
    assert parse_address(text) == "2001:db8::1"


def test_life_of_a_process() -> None:
    process = subprocess.Popen(["sleep", "60"])
    assert is_alive(process.pid) and not is_stopped(process.pid) and process.pid in list_children(os.getpid())
    process.send_signal(signal.SIGSTOP)
    _until(lambda: is_stopped(process.pid))
    assert is_alive(process.pid)
    process.kill()
    _until(lambda: not is_alive(process.pid))  # ended, and not yet waited for
    process.wait()
    assert not is_alive(process.pid) and process.pid not in list_children(os.getpid())


def _until(holds) -> None:
    end = time.monotonic() + 5
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)
