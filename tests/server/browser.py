"""Headless Chromium, driven over a pipe by its DevTools protocol: no port, no driver, no other library."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, Queue
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)  # fmt: skip
# Becomes Chromium, which reads commands from descriptor 3 and writes to 4.
SHIM = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(each), fcntl.F_DUPFD, 10) for each in sys.argv[1:3]]
for own, number in zip(pipes, (3, 4)):
    os.dup2(own, number)
os.execv(sys.argv[3], sys.argv[3:])
"""
PATIENCE = 60.0  # seconds for anything that is waited for


class Browser:
    """One page. errors: what the console got of errors and warnings. urls: what was requested."""

    def __init__(self, to_browser: int, from_browser: int):
        self.errors: list[str] = []
        self.urls: list[str] = []
        self._to, self._from = to_browser, from_browser
        self._number, self._session = 0, ""
        self._answers: Queue[dict[str, Any]] = Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Have the browser do something, and return its result. Raises AssertionError where it refuses."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            try:
                answer = self._answers.get(timeout=PATIENCE)
            except Empty:
                raise AssertionError(f"{method} was not answered; the console has {self.errors}") from None
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result

    def look(self, width: int, height: int = 800, *, dark: bool = False, still: bool = False) -> None:
        """Have a screen so large, in CSS pixels, a colour scheme, and with ``still`` no wish for motion."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2, mobile=width < 600
        )
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"},
        ]
        self.call("Emulation.setEmulatedMedia", features=features)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript comes to, a promise's too, if it can be written as JSON."""
        result = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True
        )
        assert "exceptionDetails" not in result, (expression, result["exceptionDetails"])
        return result["result"].get("value")

    def wait(self, condition: str) -> Any:
        """Wait until an expression is true, and return what it came to."""
        found = self.value(
            f"""new Promise((resolve) => {{
                const end = performance.now() + {1000 * PATIENCE / 2};
                const look = () => {{
                    const found = {condition};
                    if (found || performance.now() > end) resolve(found instanceof Node || found);
                    else setTimeout(look, 20);
                }};
                look();
            }})"""
        )
        assert found, f"{condition} never came true; the console has {self.errors}"
        return found

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, shift: bool = False) -> None:
        codes = {"Enter": 13, "Tab": 9, "Escape": 27, " ": 32}
        named = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": codes[key]}
        text = {"Enter": "\r", " ": " "}.get(key)
        down = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
        self.call("Input.dispatchKeyEvent", modifiers=8 * shift, **named, **down)
        self.call("Input.dispatchKeyEvent", modifiers=8 * shift, **named, type="keyUp")

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def _read(self) -> None:
        buffer = b""
        with suppress(OSError):  # when the pipe is closed
            while chunk := os.read(self._from, 1 << 16):
                *messages, buffer = (buffer + chunk).split(b"\0")
                for message in map(json.loads, messages):
                    self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case None:
                self._answers.put(message)
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description") or details["text"])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.errors.append(str([each.get("value") for each in params["args"]]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                self.urls.append(params["request"]["url"])


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser with its profile in a new folder below ``folder``; it has ended, with all its processes, afterwards."""
    assert BROWSER is not None
    (child_in, to_browser), (from_browser, child_out) = os.pipe(), os.pipe()
    command = [BROWSER, *FLAGS, f"--user-data-dir={folder / 'profile'}"]
    process = subprocess.Popen(
        [sys.executable, "-ISc", SHIM, str(child_in), str(child_out), *command],
        pass_fds=(child_in, child_out),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(child_in)
    os.close(child_out)
    try:
        yield Browser(to_browser, from_browser)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=PATIENCE)
        os.close(to_browser)
        os.close(from_browser)
