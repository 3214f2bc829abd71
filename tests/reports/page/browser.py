"""Headless Chromium for tests, driven over its debugging pipe: JSON messages that end in a zero byte.

The messages are those of the Chrome DevTools Protocol.
"""

import fcntl
import json
import os
import select
import subprocess
import time
from pathlib import Path
from typing import Any

PATIENCE = 60.0
"""Seconds after which a browser that says nothing is given up."""
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run",
    "--disable-background-networking", "--disable-extensions", "--window-size=1400,900",
)  # fmt: skip


class Browser:
    """One page of one browser.

    Attributes
    ----------
    events
        What the browser has told since it opened the page: console messages, exceptions, requests.
    """

    def __init__(self, binary: str, profile: Path) -> None:
        reading, told = os.pipe()
        asked, writing = os.pipe()
        inner = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (asked, told)]

        def place() -> None:
            for end, number in zip(inner, (3, 4), strict=True):
                os.dup2(end, number)

        command = [binary, *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(
            command, preexec_fn=place, pass_fds=(3, 4), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for end in (*inner, asked, told):
            os.close(end)
        self._reading, self._writing = reading, writing
        self._buffer, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the answer to a command; events that come before it are kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def open(self, path: Path, state: str = "") -> None:
        """Open a page anew and wait until it has drawn itself."""
        self.events.clear()
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=f"{path.as_uri()}{state}")
        self.wait("document.body && document.body.dataset.ready === 'true'")

    def wait(self, condition: str) -> None:
        """Wait until an expression is true and two frames have been drawn since."""
        end = time.monotonic() + PATIENCE
        while not self.value(f"!!({condition})"):
            assert time.monotonic() < end, f"not true in time: {condition}"
            time.sleep(0.02)
        self.settle()

    def settle(self) -> None:
        """Wait until what was changed is drawn."""
        self.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def value(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Send a pointer event and wait until the page has drawn what it changes."""
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self.settle()

    def key(self, key: str) -> None:
        """Press a key and wait until the page has drawn what it changes."""
        text, code = {"Enter": ("\r", 13), "/": ("/", 191)}.get(key, (key, ord(key[0].upper())))
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, text=text, windowsVirtualKeyCode=code)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)
        self.settle()

    @property
    def complaints(self) -> list[Any]:
        """What went wrong in the page: errors, warnings and exceptions."""
        wrong = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        return [event["params"] for event in self.events if event.get("method") in wrong]

    @property
    def requests(self) -> list[str]:
        """The addresses that were asked for."""
        sent = (event["params"] for event in self.events if event.get("method") == "Network.requestWillBeSent")
        return [each["request"]["url"] for each in sent]

    def close(self) -> None:
        """End the browser."""
        self.process.kill()
        self.process.wait()
        os.close(self._reading)
        os.close(self._writing)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._reading], [], [], PATIENCE)[0], "the browser says nothing"
            data = os.read(self._reading, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)
