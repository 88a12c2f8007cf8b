"""The other side of contestant.py: starts a contestant, hands it prompts, and judges what comes back."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report import environment

SCRIPT = Path(__file__).with_name("contestant.py")
_LAST_LINES = 5  # of the standard error, in the message of a process that died without one


class Failed(Exception):
    """A contestant cannot run the model; the message says why."""


@dataclass(frozen=True)
class Turn:
    """One decoding. tokens: ids. seconds: when each came. cpu_seconds, of all threads, and traffic, by counter, count
    from the first token on.
    """

    tokens: list[int]
    seconds: list[float]
    cpu_seconds: float
    traffic: dict[str, float]

    @property
    def tokens_per_s(self) -> float:
        """Of the tokens after the first, which is the prompt's."""
        return (len(self.seconds) - 1) / (self.seconds[-1] - self.seconds[0])


@dataclass(frozen=True)
class Entry:
    """A contestant as it is entered. name: in the report. slots: experts resident per layer, None for all."""

    name: str
    system: str
    slots: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


class Process:
    """A running contestant. Raises Failed with its own reason when it cannot go on."""

    def __init__(self, entry: Entry, model: Path, work: Path, python: str = sys.executable):
        self.entry = entry
        setup = {"system": entry.system, "model": str(model), "slots": entry.slots, "work": str(work)}
        command = [python, str(SCRIPT), json.dumps({**setup, "options": entry.options})]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close())
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment()
        )
        try:
            self.notes: list[str] = self._answer()["notes"]
        except Failed:
            self.close()
            raise

    def turn(self, prompt: list[int], tokens: int) -> Turn:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # what it said before it ended is read below
            print(json.dumps({"prompt": prompt, "tokens": tokens}), file=self._process.stdin, flush=True)
        turn = Turn(**self._answer())
        if len(turn.tokens) != tokens:
            raise Failed(f"{self.entry.name} gave {len(turn.tokens)} of {tokens} tokens")
        return turn

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            last = self._errors.read().decode(errors="replace").strip().splitlines()[-_LAST_LINES:]
            raise Failed(f"{self.entry.name} ended with status {self._process.returncode}: {' | '.join(last)}")
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            raise Failed(message["error"])
        return message
