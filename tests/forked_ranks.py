"""Ranks forked from one process that has imported torch, where a test is not about how ranks start.

A rank that starts afresh imports for seconds what every other has imported. What a forked one runs, its environment,
streams, process group and end are those of ``python -m``.
"""

import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NoReturn

PRELOADED = (
    "meshwise.executor.training.measure",
    "meshwise.executor.operators.trainer",
    "meshwise.executor.launch.process_group",
)
_LIMIT = 2**20
"""Bytes of a request."""


class ForkServer:
    """A process that forks ranks, of which it is the parent: it alone is told how they end."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
        command = [sys.executable, __file__, str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])

    def spawn(self, command: Sequence[str], environment: Mapping[str, str], log: IO[bytes]) -> "ForkedRank":
        """Start ``python -m command`` as the launcher does."""
        reading, writing = os.pipe()
        environment = {**environment, "MESHWISE_WATCH_PARENT": str(self._process.pid)}
        request = {"command": list(command), "environment": environment, "folder": os.getcwd()}
        pid = self.ask(request, (reading, log.fileno()))
        os.close(reading)
        return ForkedRank(self, pid, os.fdopen(writing, "wb"))

    def ask(self, request: object, descriptors: Sequence[int] = ()) -> Any:
        socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
        answer = self._socket.recv(_LIMIT)
        assert answer, "the process that forks ranks has ended"
        return json.loads(answer)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


class ForkedRank:
    """What the launcher uses of ``subprocess.Popen``."""

    def __init__(self, server: ForkServer, pid: int, stdin: IO[bytes]) -> None:
        self.pid, self.stdin = pid, stdin
        self._server = server
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            self._code = self._server.ask(self.pid)
        return self._code

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.01)
        return code

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def _serve(requests: socket.socket) -> None:
    for name in PRELOADED:
        import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a process of several threads cannot be forked"
    gc.freeze()  # pages that no collection touches stay shared
    while True:
        text, descriptors, *_ = socket.recv_fds(requests, _LIMIT, 2)
        if not text:
            return
        request = json.loads(text)
        if isinstance(request, int):
            ended, status = os.waitpid(request, os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        else:
            answer = os.fork()
            if answer == 0:
                requests.close()
                _become(request, *descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
        requests.send(json.dumps(answer).encode())


def _become(request: dict[str, Any], stdin: int, log: int) -> NoReturn:
    code = 1
    try:
        os.setsid()
        for descriptor, stream in ((stdin, 0), (log, 1), (log, 2)):
            os.dup2(descriptor, stream)
        os.close(stdin)
        os.close(log)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        module, *sys.argv[1:] = request["command"]
        sys.path[:0] = [os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
