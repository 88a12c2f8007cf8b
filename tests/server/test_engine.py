"""The generation thread: what it refuses, what it survives, and what it tells of itself."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from strata_mlx import Fault, InputError, Routing, RoutingPolicy, load, set_routing
from strata_mlx.experts.disk import DiskSettings
from strata_mlx.experts.streaming import streaming_of
from strata_mlx.models.moe import make_routing
from strata_mlx.server import engine as engines
from strata_mlx.server.engine import Engine
from strata_mlx.server.jobs import Busy, End, Job, JobError, Piece
from strata_mlx.server.scheduler import Scheduler
from strata_mlx.server.state import State
from strata_mlx.server.streams import Stream
from tests.experts.streamed import checkpoint, reads
from tests.server.served import Served, end_of, prompt, text_of, told, usage_of
from tests.tiny import make_checkpoint

Pair = tuple[nn.Module, TokenizerWrapper]
Start = Callable[..., Engine]
PATIENCE = 60.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return load(make_checkpoint(tmp_path_factory.mktemp("models") / "model", layout="stacked", mtp="stacked"), mtp=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model with 16 experts in a layer."""
    return checkpoint(tmp_path_factory.mktemp("models") / "streamed", layout="stacked")


@pytest.fixture
def start(pair: Pair) -> Iterator[Start]:
    """Start an engine, which is closed in the end."""
    with ExitStack() as stack:

        def make(model: Pair = pair, started: bool = True, **options: Any) -> Engine:
            engine = Engine(*model, **{"mtp": "off", **options})
            stack.callback(engine.close)
            if started:
                engine.start()
            return engine

        yield make


def jobs(count: int, tokens: int = 10, **options: Any) -> list[Job]:
    return [Job(prompt(n, 5 + 7 * n), tokens, **options) for n in range(count)]


def eventually(engine: Engine, holds: Callable[[State], bool]) -> State:
    """The first state in which something holds."""
    done, waited = threading.Event(), 0.0
    while not holds(state := engine.state()):
        waited += 0.01
        assert waited < PATIENCE
        done.wait(0.01)
    return state


def test_requests_from_many_threads_get_their_own_answers(pair: Pair, start: Start) -> None:
    asked = jobs(6)
    expected = [told(items) for items in Served(*pair).one_by_one(asked)]
    engine = start(mtp="on")
    results: dict[int, list[tuple[Any, ...]]] = {}

    def client(number: int) -> None:
        for _ in range(3):
            results.setdefault(number, []).append(told(list(engine.submit(asked[number]))))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert [results[number] for number in range(6)] == [[each] * 3 for each in expected]


def test_requests_from_an_event_loop(pair: Pair, start: Start) -> None:
    asked = jobs(4)
    expected = [told(items) for items in Served(*pair).one_by_one(asked)]
    engine = start()

    async def read(job: Job) -> tuple[Any, ...]:
        return told([item async for item in engine.submit(job)])

    async def main() -> list[tuple[Any, ...]]:
        return await asyncio.wait_for(asyncio.gather(*map(read, asked)), PATIENCE)

    assert asyncio.run(main()) == expected


def test_a_full_queue_is_busy_and_what_waits_is_served(start: Start) -> None:
    engine = start(started=False, max_queue=2, concurrency=1)
    streams = [engine.submit(job) for job in jobs(3)]
    with pytest.raises(Busy) as caught:
        engine.submit(jobs(1)[0])
    assert 1 <= caught.value.retry_after <= 60
    state = engine.state()
    assert (state.queue, state.totals.requests["refused"]) == (3, 1)
    assert [request.phase for request in state.requests] == ["queued"] * 3
    engine.start()
    assert [end_of(list(stream)).reason for stream in streams] == ["length"] * 3
    assert list(engine.submit(jobs(1)[0]))


def test_without_a_queue_requests_are_taken_as_long_as_they_can_be_served(start: Start) -> None:
    engine = start(started=False, max_queue=0, concurrency=2)
    for job in jobs(2):
        engine.submit(job)
    with pytest.raises(Busy):
        engine.submit(jobs(1)[0])


def test_one_that_waits_and_is_cancelled_makes_room(start: Start) -> None:
    engine = start(started=False, max_queue=1, concurrency=1)
    first, second = (engine.submit(job) for job in jobs(2, 200))
    second.cancel()
    engine.start()
    assert end_of(list(second)).reason == "cancelled"
    third = engine.submit(jobs(1)[0])
    first.cancel()
    assert end_of(list(third)).reason == "length"
    assert end_of(list(first)).reason == "cancelled"
    state = eventually(engine, lambda state: not state.requests)
    assert state.totals.requests["cancelled"] == 2


@pytest.mark.parametrize(
    ("changes", "field", "said"),
    [
        ({"prompt": (1, 259)}, "prompt", "vocabulary of 259"),
        ({"prompt": (-1,)}, "prompt", "vocabulary of 259"),
        ({"logit_bias": {259: 1.0}}, "logit_bias", "259 is not in the vocabulary"),
        ({"top_k": 259}, "top_k", "less than the vocabulary"),
        ({"prompt": prompt(0, 50)}, "prompt", "50 tokens, and this server has room for 50"),
    ],
)
def test_what_the_model_cannot_do_is_refused_at_once(
    start: Start, changes: dict[str, Any], field: str, said: str
) -> None:
    engine = start(started=False, max_context=50)
    with pytest.raises(JobError, match=said) as caught:
        engine.submit(replace(jobs(1)[0], **changes))
    assert caught.value.field == field


def test_an_answer_ends_where_the_context_is_full(start: Start) -> None:
    engine = start(max_context=50)
    end = end_of(list(engine.submit(Job(prompt(0, 40), 100))))
    assert (end.reason, end.usage.completion_tokens) == ("length", 10)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"mtp": "maybe"}, "mtp is 'maybe'"), ({"concurrency": 0}, "concurrency is 0"), ({"max_queue": -1}, "max_queue")],
)
def test_options_out_of_range_are_refused(pair: Pair, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Engine(*pair, **options)


def test_close_ends_every_stream_with_a_fault_and_takes_nothing_more(start: Start) -> None:
    engine = start(concurrency=2)
    streams = [engine.submit(job) for job in jobs(4, 10_000)]
    assert isinstance(next(iter(streams[0])), Piece)
    engine.close()
    for stream in streams:
        with pytest.raises(Fault, match="closing"):
            list(stream)
    assert not engine.alive
    with pytest.raises(Fault, match="closing"):
        engine.submit(jobs(1)[0])
    engine.close()


def test_a_process_ends_cleanly_after_close(folder: Path) -> None:
    script = f"""
from strata_mlx import load
from strata_mlx.server.engine import Engine
from strata_mlx.server.jobs import Job

engine = Engine(*load({str(folder)!r}))
engine.start()
print(list(engine.submit(Job((1, 2), 3)))[-1].reason)
engine.close()
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "length\n", "")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_that_nobody_understands_ends_every_stream_and_is_told(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(started=False)
    streams = [engine.submit(job) for job in jobs(2)]

    def turn(_: Scheduler) -> None:
        raise ZeroDivisionError("no idea")

    monkeypatch.setattr(Scheduler, "turn", turn)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    engine.start()
    for stream in streams:
        with pytest.raises(Fault, match="ZeroDivisionError: no idea"):
            list(stream)
    state = eventually(engine, lambda state: not state.alive)
    assert "no idea" in str(state.trouble)
    with pytest.raises(Fault, match="no idea"):
        engine.submit(jobs(1)[0])


def test_a_thread_that_comes_no_further_is_not_alive(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, entered, go_on = start(started=False), threading.Event(), threading.Event()
    turn = Scheduler.turn

    def slow(scheduler: Scheduler) -> None:
        entered.set()
        go_on.wait(PATIENCE)
        turn(scheduler)

    monkeypatch.setattr(Scheduler, "turn", slow)
    stream = engine.submit(jobs(1)[0])
    found = [engine.state()]
    engine.start()
    assert entered.wait(PATIENCE)
    found.append(engine.state())
    with monkeypatch.context() as shorter:
        shorter.setattr(engines, "STALLED", 0.0)
        found.append(engine.state())
    go_on.set()
    assert end_of(list(stream)).reason == "length"
    found.append(engine.state())
    assert [state.alive for state in found] == [False, True, False, True]
    assert "more than 0 seconds" in str(found[2].trouble)


def fails_once(error: BaseException) -> Callable[[int], None]:
    left = [error]

    def act(_: int) -> None:
        if left:
            raise left.pop()

    return act


@pytest.mark.parametrize("mtp", ["off", "on"])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), MemoryError()], ids=["disk", "memory"])
def test_a_window_that_fails_ends_its_requests_and_the_next_work(
    folder: Path, start: Start, mtp: str, error: BaseException
) -> None:
    pair = load(folder, slots=5, mtp=True)
    streaming = streaming_of(pair[0])
    assert streaming
    streaming.store.settings = DiskSettings(1)
    engine = start(pair, mtp=mtp)
    first = engine.submit(Job(prompt(0, 20), 300))
    assert isinstance(next(iter(first)), Piece)
    with reads(fails_once(error)), pytest.raises(Fault, match=r"broken|memory"):
        list(first)
    expected = load(folder)
    asked = jobs(3)
    texts = [text_of(list(stream)) for stream in [engine.submit(job) for job in asked]]
    assert texts == [text_of(items) for items in Served(*expected).one_by_one(asked)]
    assert engine.alive
    state = eventually(engine, lambda state: not state.requests)
    assert (state.totals.requests["failed"], state.totals.requests["length"]) == (1, 3)


def test_experts_from_disk_give_the_same_texts_and_the_cost_is_shared_out(folder: Path, start: Start) -> None:
    asked = jobs(5, top_logprobs=2)
    expected = [told(items) for items in Served(*load(folder)).one_by_one(asked)]
    engine = start(load(folder, slots=5), started=False)
    streams = [engine.submit(job) for job in asked]
    engine.start()
    results = [list(stream) for stream in streams]
    assert [told(items) for items in results] == expected
    usages = [usage_of(items) for items in results]
    experts = eventually(engine, lambda state: not state.requests).experts
    assert experts.traffic
    for name, total in (("hits", "hits"), ("misses", "misses"), ("bytes_read", "bytes")):
        shared = sum(getattr(usage, name) for usage in usages)
        assert shared == pytest.approx(getattr(experts.traffic, total), abs=len(asked))
        assert shared > 0
    assert all(len(layer.resident) <= layer.slots == 5 for layer in experts.streamed)
    assert all(usage.mode == "exact" for usage in usages)


def test_routing_that_prefers_what_is_in_memory_does_so_in_the_batch(folder: Path, start: Start) -> None:
    misses = {}
    for bonus in (0.0, 3.0):
        model, tokenizer = load(folder, slots=6)
        set_routing(model, make_routing(model, RoutingPolicy(moce_bonus=bonus), None))
        engine = start((model, tokenizer), started=False)
        streams = [engine.submit(job) for job in jobs(4, 40)]
        engine.start()
        usages = [usage_of(list(stream)) for stream in streams]
        mode = "biased" if bonus else "exact"
        assert {usage.mode for usage in usages} == {mode}
        assert engine.state().mode == mode
        misses[bonus] = sum(usage.misses or 0 for usage in usages)
    assert misses[3.0] < 0.7 * misses[0.0]


def test_the_state_counts_what_was_done(start: Start) -> None:
    engine = start(mtp="on", concurrency=4)
    asked = [*jobs(3), *jobs(3)]
    usages = [usage_of(list(engine.submit(job))) for job in asked]
    state = eventually(engine, lambda state: not state.requests)
    totals = state.totals
    assert totals.requests == {"stop": 0, "length": 6, "cancelled": 0, "failed": 0, "refused": 0}
    assert totals.prompt_tokens == sum(len(job.prompt) for job in asked)
    assert totals.cached_tokens == sum(usage.cached_tokens for usage in usages) == 18  # of the one that is long enough
    assert totals.completion_tokens == 60
    assert totals.drafted == sum(usage.drafted for usage in usages)
    assert sum(totals.accepted) == sum(usage.accepted for usage in usages)
    assert totals.seconds["verify"] > 0
    assert sum(totals.first_token.counts) == 6
    assert totals.first_token.sum == pytest.approx(sum(usage.seconds_prompt for usage in usages))
    assert (state.alive, state.trouble, state.drafting, state.mode) == (True, None, "on", "exact")
    assert (state.experts.layers, state.experts.count, state.experts.streamed) == (3, 8, ())
    assert state.memory.used > 0
    assert 0 < state.memory.prefixes <= state.memory.prefix_budget
    assert state.memory.budget is None


def test_the_state_shows_requests_on_their_way(start: Start) -> None:
    engine = start(concurrency=1)
    streams = [engine.submit(job) for job in jobs(2, 10_000)]
    assert isinstance(next(iter(streams[0])), Piece)
    decoding, queued = engine.state().requests
    assert (decoding.phase, decoding.read, decoding.max_tokens) == ("decoding", 4, 10_000)
    assert decoding.completion_tokens > 0
    assert (queued.phase, queued.prompt_tokens, queued.completion_tokens) == ("queued", 12, 0)
    assert streams[0].usage.completion_tokens > 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file system that is full")
def test_a_profile_that_cannot_be_written_is_said_once_and_requests_go_on(
    folder: Path, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "profile.json"
    pair = load(folder, slots=5, expert_profile=file)
    monkeypatch.setattr(engines, "_PROFILE_EVERY", 0.0)
    (tmp_path / f".unfinished-{os.getpid()}-profile.json").symlink_to("/dev/full")
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)  # the disk stays full
    engine = start(pair)
    assert [end_of(list(engine.submit(job))).reason for job in jobs(3)] == ["length"] * 3
    assert capsys.readouterr().err.count("No space left on device") == 1
    assert not file.exists()


def test_a_profile_is_written_while_the_server_runs(
    folder: Path, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "profile.json"
    monkeypatch.setattr(engines, "_PROFILE_EVERY", 0.0)
    engine = start(load(folder, slots=5, expert_profile=file))
    list(engine.submit(jobs(1)[0]))
    engine.close()
    assert file.exists()


def test_a_cancelled_reader_in_a_loop_ends_the_work(start: Start) -> None:
    engine = start()

    async def main() -> Stream:
        stream = engine.submit(jobs(1, 100_000)[0])
        assert isinstance(await anext(stream), Piece)
        stream.cancel()
        async for item in stream:
            if isinstance(item, End):
                assert item.reason == "cancelled"
        return stream

    asyncio.run(asyncio.wait_for(main(), PATIENCE))
    assert not eventually(engine, lambda state: not state.requests).requests


def test_routing_without_a_policy_is_told(start: Start, pair: Pair) -> None:
    set_routing(pair[0], Routing())
    assert start(started=False).state().routing == "exact"
