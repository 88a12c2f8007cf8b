"""Servers as processes: started, waited for, and watched from outside."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from benchmarks.report import environment, free_ports

MODEL = "default_model"  # what mlx_lm.server calls the one that it was started with
PATIENCE = 120.0  # seconds that a server may take to start
_LAST_LINES = 5  # of the standard error, in the message about a server that does not start


class Failed(Exception):
    """A server does not start; the message says why."""


class Server:
    """A running server. url: where it listens. Raises Failed where it does not start."""

    def __init__(self, name: str, command: Sequence[str], port: int):
        self.name, self.url = name, f"http://127.0.0.1:{port}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close())
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log, env=environment())
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def resident_bytes(self) -> int:
        """Memory that the process has now."""
        if sys.platform == "darwin":
            size = subprocess.run(["ps", "-o", "rss=", "-p", str(self._process.pid)], capture_output=True, check=True)
            return int(size.stdout) * 1024
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def cpu_seconds(self) -> float | None:
        """Of all its threads until now; None where the system does not say."""
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError:
            return None
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _wait(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while self.running and time.monotonic() < deadline:
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.1)
        last = " | ".join(self.log().strip().splitlines()[-_LAST_LINES:])
        raise Failed(f"{self.name} does not start: {last or 'it says nothing'}")


def ours(model: Path, streams: int, *options: str) -> Server:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "strata_mlx", "server", "--model", str(model), "--port", str(port)]
    command += ["--decode-concurrency", str(streams), "--served-model-name", MODEL, "--log-level", "WARNING"]
    return Server("ours", [*command, *options], port)


def mlx_lm(model: Path, streams: int) -> Server:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(model), "--port", str(port)]
    command += ["--decode-concurrency", str(streams), "--log-level", "WARNING"]
    return Server("mlx_lm.server", command, port)
