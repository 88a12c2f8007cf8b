"""Several ranks give the text of one, and none waits for one that is lost."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.cli.conftest import Run, run  # noqa: F401
from tests.experts.streamed import checkpoint
from tests.parallel import program
from tests.parallel.launched import generate, hostfile
from tests.parallel.processes import PATIENCE, ranks, results, told
from tests.tiny import make_checkpoint

SLOTS = 4  # of 5 or 6 experts that each of three ranks has of a layer
TIMEOUT = 2.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("parallel") / "model")


def test_ranks_decode_what_one_decodes(folder: Path, tmp_path: Path) -> None:
    with ranks(3, tmp_path, program.__file__, str(folder), str(SLOTS)) as processes:
        found = results(processes)
    alone = program.run(folder, None, None)
    for way in program.WAYS:
        assert [each[way] for each in found] == [alone[way]] * 3, way
    assert found[0]["served"] == alone["served"]
    assert all(each["misses"] > 0 for each in found)
    assert found[1]["biased"] == found[2]["biased"] == found[0]["biased"]
    assert found[0]["biased"] != alone["plain"]  # residents of other ranks are preferred too, or nothing would change


@pytest.mark.parametrize(("lost", "sent"), [(1, signal.SIGKILL), (0, signal.SIGSTOP)])
def test_a_rank_that_is_lost_ends_all_others_with_an_error(tmp_path: Path, lost: int, sent: signal.Signals) -> None:
    model = make_checkpoint(tmp_path / "model", "qwen3_moe", "stacked")
    with ranks(3, tmp_path, str(Path(__file__).with_name("endless.py")), str(model), str(TIMEOUT)) as processes:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "running\n"
        processes[lost].send_signal(sent)
        begun = time.monotonic()
        for rank, process in enumerate(processes):
            if rank != lost:
                _, errors = process.communicate(timeout=PATIENCE)
                assert len(told(errors)) == 1, errors
                assert told(errors)[0].startswith(f"error: rank {lost} ")
                assert ("has been silent for 2 s" in told(errors)[0]) == (sent is signal.SIGSTOP)
                assert process.returncode == 1
        assert time.monotonic() - begun < PATIENCE / 2


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    program = tmp_path / "fails.py"
    program.write_text(
        "from strata_mlx import expert_parallel, Fault\n"
        "with expert_parallel() as ranks:\n"
        "    if ranks.rank == 1:\n"
        "        raise Fault('the disk has gone')\n"
        "    ranks.broadcast() if ranks.rank else ranks.exchange(0)\n"
    )
    with ranks(3, tmp_path, str(program)) as processes:
        errors = [process.communicate(timeout=PATIENCE)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 1, 1]
    for rank in (0, 2):
        assert told(errors[rank]) == ["error: rank 1 has failed: the disk has gone"], errors[rank]


def test_a_hostfile_starts_the_ranks_and_rank_0_alone_speaks(tmp_path: Path, run: Run) -> None:  # noqa: F811
    hosts = hostfile(tmp_path, 2)
    model = make_checkpoint(tmp_path / "model", "qwen3_moe", "stacked", vocab_size=256, eos_token_id=None)
    options = ["--model", str(model), "-p", "ab", "-m", "8", "--verbose", "False", "--ignore-chat-template"]
    expected, found = run("generate", *options), generate(*options, "--hostfile", str(hosts))
    assert (found.returncode, found.stdout, found.stderr) == (0, expected.out, "")
    wrong = generate(*options, "--hostfile", str(hosts), "--top-k", "999")
    assert wrong.returncode == 2
    assert wrong.stderr.count("error: --top-k 999 must be less") == 1
