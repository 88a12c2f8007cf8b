"""One record per round of a text, written as JSON lines while the text is made (``generate --trace FILE``).

The first line is the header, the last one says how the text ended, and each line between is a round: one forward of the
model, which is a plain step where nothing was drafted. Without the last line, the process ended before the text did.

    {"schema": "strata-mlx trace", "version": 1, "model": "qwen3_next", "device": "cpu", "dtype": "float32",
     "streams": true, "versions": {"strata-mlx": ..., "mlx": ...}, "options": {"max_tokens": 100, ...}}
    {"round": 0, "p": [0.93, 0.41], "retained": 1, "accepted": 1, "committed": 2, "rows": 2,
     "seconds": {"draft": 0.001, "verify": 0.012, "commit": 0.0004},
     "experts": {"hits": 71, "misses": 9, "bytes": 172800, "stall_seconds": 0.0002}}
    {"finish": "length", "rounds": 61, "tokens": 100}

p: the head's confidence in each draft that was made, null where it is not finite. retained: drafts that were verified.
accepted: that the trunk confirmed. committed: tokens that the round gave. rows: that the trunk computed. seconds: what
the caller waited for each part; without drafting, the first round's are those of the prompt too. experts: what reading
came to since the line before, with a model that streams: experts of a layer's window that were in memory, and that were
read, the bytes, and for how long the device had nothing to compute. A round's last part begins the next one's drafts.
finish: "stop", "length" or "interrupted".
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._version import __version__
from .errors import InputError
from .speculation.record import Round

if TYPE_CHECKING:
    import mlx.nn as nn

    from .engine import GenerationResponse
    from .experts.streaming import Streaming
    from .experts.traffic import Traffic

SCHEMA, VERSION = "strata-mlx trace", 1
FINISHES = ("stop", "length", "interrupted")
_SECONDS = ("draft", "verify", "commit")


class TraceWriter:
    """Writes a trace. Every line is with the system when a method returns.

    Where the disk gives out, one line on standard error says so, what was written before stays, and nothing else is
    written: the text matters more.
    """

    def __init__(self, path: Path):
        """Open the file, and leave what is in it until begin(). Raises InputError where it cannot be written."""
        self.path = path
        try:
            self._file: int | None = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        except OSError as error:
            raise InputError(f"--trace {path}: cannot be written ({error.strerror}); choose another file") from error
        self._size = self._rounds = self._tokens = 0
        self._begun = False
        self._streaming: Streaming | None = None
        self._before: Traffic | None = None

    def begin(self, model: nn.Module, options: Mapping[str, Any]) -> None:
        """Write the header, for a text of ``model``. options: by which it is made, ready for JSON."""
        from importlib.metadata import version

        import mlx.core as mx

        from .device import compute_dtype_of
        from .experts.streaming import streaming_of

        self._streaming = streaming_of(model)
        self._before = self._streaming.traffic() if self._streaming else None
        header = {
            "schema": SCHEMA,
            "version": VERSION,
            "model": model.model_type,
            "device": mx.default_device().type.name,
            "dtype": compute_dtype_of(model),
            "streams": self._streaming is not None,
            "versions": {"strata-mlx": __version__, "mlx": version("mlx")},
            "options": dict(options),
        }
        self._begun = True
        if self._file is not None:
            with suppress(OSError):  # a pipe or a device
                os.ftruncate(self._file, 0)
        self._write(header)

    def round(self, latest: Round) -> None:
        """Write one more round."""
        record: dict[str, Any] = {
            "round": self._rounds,
            "p": [p if math.isfinite(p) else None for p in latest.confidences],
            "retained": latest.retained,
            "accepted": latest.accepted,
            "committed": latest.committed,
            "rows": latest.rows,
            "seconds": {
                "draft": round(latest.draft_seconds, 7),
                "verify": round(latest.verify_seconds, 7),
                "commit": round(latest.commit_seconds, 7),
            },
        }
        if self._streaming and self._before:
            now, before = self._streaming.traffic(), self._before
            record["experts"] = {
                "hits": now.hits - before.hits,
                "misses": now.misses - before.misses,
                "bytes": now.bytes - before.bytes,
                "stall_seconds": round(now.stall_seconds - before.stall_seconds, 7),
            }
            self._before = now
        self._rounds += 1
        self._tokens += latest.committed
        self._write(record)

    def follow(self, responses: Iterable[GenerationResponse]) -> Iterator[GenerationResponse]:
        """Pass on ``responses``, and close the trace after the last."""
        for response in responses:
            yield response
            if response.finish_reason:
                self.close(response.finish_reason)

    def close(self, finish: str = "interrupted") -> None:
        """Write how the text ended, and close the file. Does nothing the second time."""
        if self._begun:
            self._write({"finish": finish, "rounds": self._rounds, "tokens": self._tokens})
        if self._file is not None:
            file, self._file = self._file, None
            with suppress(OSError):  # everything is written
                os.close(file)

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            return
        line = memoryview(json.dumps(record).encode() + b"\n")
        written = 0
        try:
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError as error:
            self._give_up(error)
        else:
            self._size += len(line)

    def _give_up(self, error: OSError) -> None:
        """Leave whole lines behind."""
        assert self._file is not None
        file, self._file = self._file, None
        with suppress(OSError):  # the disk has gone, or it is a pipe: the reader is told of half a line
            os.ftruncate(file, self._size)
        with suppress(OSError):
            os.close(file)
        if sys.stderr:  # closed, print would write to standard output
            print(f"warning: {self.path}: the trace ends here: {error.strerror}", file=sys.stderr)


@dataclass(frozen=True)
class ExpertReads:
    """hits, misses: experts that windows needed, in memory or not. bytes: read. stall_seconds: in reads alone."""

    hits: int
    misses: int
    bytes: int
    stall_seconds: float


@dataclass(frozen=True)
class Trace:
    """What a file holds. experts: by round, None of a model that does not stream. finish: None where the file ends
    before the text.
    """

    header: dict[str, Any]
    rounds: tuple[Round, ...]
    experts: tuple[ExpertReads | None, ...]
    finish: str | None


def read_trace(path: Path) -> Trace:
    """Read what TraceWriter wrote. Raises InputError, with file and line, for anything else."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    rounds: list[Round] = []
    experts: list[ExpertReads | None] = []
    header: dict[str, Any] | None = None
    finish = None
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        record = _parse(line, where)
        if header is None:
            header = _header(record, where)
        elif finish is not None:
            raise InputError(f"{where}: follows the last line of the trace")
        elif "finish" in record:
            tokens = sum(each.committed for each in rounds)
            totals = record.get("rounds"), record.get("tokens")
            if record["finish"] not in FINISHES or totals != (len(rounds), tokens):
                raise InputError(f"{where}: does not end a trace of {len(rounds)} rounds and {tokens} tokens")
            finish = record["finish"]
        else:
            rounds.append(_round(record, len(rounds), where))
            experts.append(_experts(record, header["streams"], where))
    if header is None:
        raise InputError(f"{path}: is empty; a trace begins with its header")
    return Trace(header, tuple(rounds), tuple(experts), finish)


def _parse(line: bytes, where: str) -> dict[str, Any]:
    if not line.endswith(b"\n"):
        raise InputError(f"{where}: is cut short")
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not valid JSON ({error})") from error
    if not isinstance(record, dict):
        raise InputError(f"{where}: expected an object")
    return record


def _header(record: dict[str, Any], where: str) -> dict[str, Any]:
    if record.get("schema") != SCHEMA:
        raise InputError(f"{where}: not the header of a trace")
    if record.get("version") != VERSION:
        raise InputError(f"{where}: the trace has version {record.get('version')!r}, and this program reads {VERSION}")
    if not isinstance(record.get("streams"), bool):
        raise InputError(f"{where}: streams must be true or false")
    return record


def _round(record: dict[str, Any], number: int, where: str) -> Round:
    if record.get("round") != number:
        raise InputError(f"{where}: round is {record.get('round')!r}, expected {number}")
    p, seconds = record.get("p"), record.get("seconds")
    if not isinstance(p, list) or not all(each is None or _is_number(each) for each in p):
        raise InputError(f"{where}: p must be a list of numbers")
    if not isinstance(seconds, dict) or not all(_is_number(seconds.get(name)) for name in _SECONDS):
        raise InputError(f"{where}: seconds must have the numbers {', '.join(_SECONDS)}")
    counts = [_count(record, name, where) for name in ("retained", "accepted", "committed", "rows")]
    retained, accepted, committed, rows = counts
    if not accepted <= retained <= len(p) or not 1 <= committed <= 1 + accepted or rows != 1 + retained:
        raise InputError(
            f"{where}: {len(p)} drafts, {retained} retained, {accepted} accepted, {committed} committed and {rows} "
            "rows do not go together"
        )
    confidences = tuple(math.nan if each is None else float(each) for each in p)
    return Round(confidences, retained, accepted, committed, *(float(seconds[name]) for name in _SECONDS))


def _experts(record: dict[str, Any], streams: bool, where: str) -> ExpertReads | None:
    found = record.get("experts")
    if found is None and not streams:
        return None
    if not streams or not isinstance(found, dict) or not _is_number(found.get("stall_seconds")):
        raise InputError(f"{where}: experts must be there, with what was read, where and only where the model streams")
    hits, misses, nbytes = (_count(found, name, where) for name in ("hits", "misses", "bytes"))
    return ExpertReads(hits, misses, nbytes, float(found["stall_seconds"]))


def _count(record: dict[str, Any], name: str, where: str) -> int:
    value = record.get(name)
    if type(value) is not int or value < 0:
        raise InputError(f"{where}: {name} is {value!r}, expected a whole number")
    return value


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
