"""Start the ranks of a run on the machines of a hostfile, through mlx.launch."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn

from ..errors import InputError

BACKENDS = ("ring", "mpi", "jaccl", "jaccl-ring", "nccl")
STARTED = "STRATA_MLX_RANK"  # in the environment of a process that was started here
_LONGEST = 100_000  # bytes of a command, of which Linux takes 128 KiB
_GRACE = 10.0  # seconds that the ranks have to end after Ctrl-C
# mlx.launch takes Ctrl-C for an error of its own; rank 0 is to have it. Ranks inherit that they ignore it.
_LAUNCH = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "from mlx._distributed_utils.launch import main; main()"
)
_ENDED = re.compile(r"Node with rank (\d+) (?:exited with code (-?\d+)|was killed)")


def launch(hostfile: Path, backend: str | None, command: Sequence[str]) -> int:
    """Run ``python -m strata_mlx COMMAND`` on every host and return rank 0's exit code, or that of another that failed.

    hostfile: in mlx.launch's format. backend: one of BACKENDS; None as the file says, or what mlx.launch takes.
    Raises InputError for a hostfile that is broken, and for a command that is too long.
    """
    check_hostfile(hostfile, backend)
    if sum(len(os.fsencode(word)) + 3 for word in command) > _LONGEST:
        raise InputError("the command is too long to be handed to the ranks: give a shorter prompt")
    launcher = [sys.executable, "-c", _LAUNCH, "--hostfile", str(hostfile), "--env", f"{STARTED}=1"]
    launcher += ["--backend", backend] if backend else []
    port = str(20_000 + 100 * secrets.randbelow(100))  # not mlx.launch's own, which another run may have
    launcher += ["--starting-port", port, "--nccl-port", port]
    ranks = [sys.executable, "-m", "strata_mlx", *command]
    # The launcher wants a standard input that does not end. In a group of its own, all get signals together.
    process = subprocess.Popen(
        [*launcher, "--", *ranks], stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        assert process.stderr is not None
        codes = _wait(process, process.stderr)
    finally:
        signal.signal(signal.SIGTERM, before)
        _signal(process, signal.SIGTERM)
    if not codes:
        return process.returncode
    # When one has failed, mlx.launch ends the others by signals, whose numbers it tells as negative codes.
    return next((code for _, code in sorted(codes.items()) if code > 0), 1)


def check_hostfile(hostfile: Path, backend: str | None) -> None:
    """Raise InputError for a file that mlx.launch cannot use."""
    from mlx._distributed_utils.common import Hostfile

    try:
        found = Hostfile.from_file(hostfile)
    except ValueError as error:
        raise InputError(f"--hostfile {hostfile}: {error}") from error
    if not found.hosts:
        raise InputError(f"--hostfile {hostfile}: names no host")
    if (backend or found.backend or "ring") != "mpi" and not all(host.ips for host in found.hosts):
        raise InputError(f'--hostfile {hostfile}: each host needs an address, such as "ips": ["192.168.0.10"]')


def _wait(process: subprocess.Popen[bytes], errors: IO[bytes]) -> dict[int, int]:
    """Pass on what ranks write to standard error until all have ended. Returns the exit codes that were told."""
    codes: dict[int, int] = {}
    interrupted = False
    while True:
        try:
            for line in iter(errors.readline, b""):
                text = line.decode(errors="replace")
                if ended := _ENDED.search(text):
                    codes[int(ended[1])] = int(ended[2] or 1)
                else:
                    sys.stderr.write(text)
                    sys.stderr.flush()
            process.wait()
            return codes
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            _signal(process, signal.SIGINT)
            signal.signal(signal.SIGALRM, _terminated)
            signal.setitimer(signal.ITIMER_REAL, _GRACE)
        finally:
            if process.returncode is not None:
                signal.setitimer(signal.ITIMER_REAL, 0)


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return


def _terminated(number: int, _: FrameType | None) -> NoReturn:
    sys.exit(130 if number == signal.SIGALRM else 128 + number)
