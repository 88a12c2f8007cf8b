"""An engine that says what a test tells it to, and a server around an engine, in this process."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from strata_mlx.errors import Fault
from strata_mlx.server.app import make_app
from strata_mlx.server.jobs import Busy, End, Job, Piece, Usage
from strata_mlx.server.running import listen, server_of, url_of
from strata_mlx.server.serving import Generates, Settings
from strata_mlx.server.state import ExpertState, MemoryState, State, Totals
from strata_mlx.server.streams import Item, Stream

WAIT = 30  # seconds that nothing here takes
END = "<|endoftext|>"
TEMPLATE = (
    "{% if tools %}[{% for tool in tools %}{{ tool.function.name }};{% endfor %}]{% endif %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}"
    "{% for tool_call in (m.tool_calls or []) %}<tool_call>{{ tool_call.function.name }}"
    "{{ tool_call.function.arguments | tojson }}</tool_call>{# tool_call.name #}{% endfor %}"
    "{% if not (loop.last and continue_final_message) %}{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking %}<think>{% else %}<think></think>{% endif %}"
    "{% endif %}"
)


class WatchedStream(Stream):
    """left: set when nobody will read on."""

    def __init__(self, job: Job):
        super().__init__(job)
        self.left = threading.Event()

    def cancel(self) -> None:
        super().cancel()
        self.left.set()


class ScriptedEngine:
    """answer: what a job's stream holds from the beginning; more can be put into ``streams``, in the order of jobs."""

    def __init__(self) -> None:
        self.alive = False
        self.reset()

    def reset(self) -> None:
        self.answer: Callable[[Job], Iterable[Item | Fault]] = lambda job: text("Hello.", job)
        self.room = 1000  # jobs that are taken
        self.refusal: Exception | None = None
        self.streams: list[WatchedStream] = []
        self.submitted = threading.Semaphore(0)

    def start(self) -> None:
        self.alive = True

    def close(self) -> None:
        self.alive = False
        for stream in self.streams:
            stream.put(Fault("the server ends"))

    def submit(self, job: Job) -> WatchedStream:
        if self.refusal:
            raise self.refusal
        if len(self.streams) >= self.room:
            raise Busy(7)
        stream = WatchedStream(job)
        for item in self.answer(job):
            stream.put(item)
        self.streams.append(stream)
        self.submitted.release()
        return stream

    @property
    def job(self) -> Job:
        """The latest."""
        return self.streams[-1].job

    def stream(self) -> WatchedStream:
        """The latest one, as soon as there is one that nobody has asked for yet."""
        assert self.submitted.acquire(timeout=WAIT)
        return self.streams[-1]

    def state(self) -> State:
        memory = MemoryState("process memory", 1, None, 0, 0, {})
        return State(
            0.0,
            self.alive,
            None,
            "exact",
            "plain",
            "exact",
            "off",
            0,
            1,
            1,
            (),
            Totals(),
            ExpertState(1, 8, (0,)),
            memory,
        )


def usage(job: Job, tokens: int = 3, cached: int = 2, drafted: int = 4, accepted: int = 3) -> Usage:
    return Usage(len(job.prompt), cached, tokens, drafted, accepted, "exact", None, None, None, 0.25, 0.5)


def text(said: str, job: Job, reason: str = "stop", stop: str | None = None, size: int = 3) -> list[Item]:
    """``said`` in pieces of ``size`` characters, and the end."""
    pieces = [Piece(said[begin : begin + size]) for begin in range(0, len(said), size)]
    return [*pieces, End(reason, stop, usage(job))]


def make_tokenizer(path: Path, template: str | None = TEMPLATE) -> TokenizerWrapper:
    """Its tokens are bytes and marks of thinking and calls; it calls tools as JSON."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    if template is not None:
        marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")
        tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    path.mkdir(exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return load_tokenizer(path)


@contextmanager
def serving(engine: Generates, settings: Settings) -> Iterator[str]:
    """The address of a server, without a slash at its end."""
    ready = threading.Event()
    with listen("127.0.0.1", 0) as listening:
        server = server_of(make_app(engine, settings), ready=ready.set, ends=engine.close)
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        assert ready.wait(WAIT)
        try:
            yield url_of(listening)
        finally:
            server.should_exit = True
            thread.join(WAIT)
            assert not thread.is_alive()
