"""Drive a headless Chromium over its debugging pipe (JSON between NUL bytes), with nothing but the standard library."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--disable-extensions", "--mute-audio",
    "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
PATIENCE = 600.0  # seconds; only ends what hangs


def find() -> str | None:
    """Return the path of a Chromium, or None."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for path in map(shutil.which, names) if path), None)


class Tab:
    """A page in the browser. `complaints` has every error and warning of its console, and scripts' exceptions."""

    def __init__(self, to: BinaryIO, back: BinaryIO) -> None:
        self._to, self._from, self._count, self._buffer = to, back, 0, b""
        self.complaints: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = ""
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol and return its result."""
        self._count += 1
        session = {"sessionId": self._session} if getattr(self, "_session", "") else {}
        message = {"id": self._count, "method": method, "params": params, **session}
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while True:
            answer = self._receive()
            if answer.get("id") == self._count:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            read = os.read(self._from.fileno(), 1 << 16)
            assert read, "Chromium has ended"
            self._buffer += read
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"])[:2000])
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(params["args"])[:2000])
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(json.dumps(params["entry"])[:2000])

    def run(self, script: str) -> Any:
        """Evaluate JavaScript and return its value; promises are awaited."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, f"{script}: {found['exceptionDetails']}"
        return found["result"].get("value")

    def go(self, address: str) -> None:
        """Open an address and wait until its script has run."""
        self.send("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def wait(self, condition: str) -> Any:
        """Wait until a JavaScript expression is true; return its value."""
        return until(lambda: self.run(condition), condition)

    def look(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Set the size of the window and the colour scheme."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Send an event of the mouse: Moved, Pressed or Released."""
        self.send("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **more)

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Write a picture of the page."""
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))


def until(done: Callable[[], Any], what: str) -> Any:
    """Call a function until it returns something true."""
    end = time.monotonic() + PATIENCE
    while not (value := done()):
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.05)
    return value


@contextmanager
def open_tab(directory: Path) -> Iterator[Tab]:
    """Start Chromium with a fresh profile in a directory, and give its first tab."""
    program = find()
    assert program is not None
    (child_in, to), (back, child_out) = os.pipe(), os.pipe()
    flags = " ".join(FLAGS)
    command = f'exec "$0" {flags} "--user-data-dir=$1" 3<&{child_in} 4>&{child_out}'
    process = subprocess.Popen(
        ["bash", "-c", command, program, str(directory)], pass_fds=(child_in, child_out), stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(child_in)
    os.close(child_out)
    with os.fdopen(to, "wb") as writer, os.fdopen(back, "rb", buffering=0) as reader:
        try:
            yield Tab(writer, reader)
        finally:
            process.terminate()
            process.wait()
