"""One system that decodes the model in a process of its own, for streaming_speed.py.

    python contestant.py '{"system": "boyle", "model": "...", "slots": 32, "work": "...", "options": {}}'

Prints one JSON object a line: first ``{"notes": [...]}``, when the model is loaded; then, for each line
``{"prompt": [ids], "tokens": N}`` that it reads, ``{"tokens": [ids], "seconds": [time of each], "cpu_seconds": S,
"traffic": {...}}``;
``{"error": "..."}`` where it cannot go on. Whatever else a system prints goes to the standard error.

Runs in the environment of the peers, where the project is not installed: imports nothing of it unless asked to.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Setup:
    """model: its folder. slots: experts of each layer in memory, None for all. work: a folder for files of one's own.
    options: of the system.
    """

    system: str
    model: str
    slots: int | None
    work: str
    options: dict[str, Any]

    def folder(self, name: str) -> Path:
        return Path(self.work) / name


@dataclass(frozen=True)
class Contestant:
    """A loaded system. decode: a prompt and a number of tokens to token ids, greedily. traffic: counters that grow."""

    decode: Callable[[list[int], int], Iterator[int]]
    traffic: Callable[[], dict[str, float]] = dict
    notes: list[str] = field(default_factory=list)


def stub_uncached_reads() -> str:
    """Let ``fcntl(fd, F_NOCACHE, 1)`` succeed and do nothing, where the system has no such call."""
    import fcntl

    number, original = 48, fcntl.fcntl

    def stubbed(fd: Any, command: int, argument: Any = 0) -> Any:
        return 0 if command == number else original(fd, command, argument)

    fcntl.fcntl = stubbed
    fcntl.F_NOCACHE = number  # type: ignore[attr-defined]
    return "fcntl(F_NOCACHE) does nothing here: the system has no such call"


def integer(array: Any) -> int:
    """The value of an array of one integer."""
    value = array.item()
    assert isinstance(value, int)
    return value


def mlx_lm_decode(model: Any) -> Callable[[list[int], int], Iterator[int]]:
    """mlx_lm's loop, which prepares the next token while the caller has the last one."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    def decode(prompt: list[int], tokens: int) -> Iterator[int]:
        for token, _ in generate_step(mx.array(prompt), model, max_tokens=tokens):
            yield int(token)

    return decode


def load_mlx_lm(setup: Setup) -> Contestant:
    import mlx_lm

    return Contestant(mlx_lm_decode(mlx_lm.load(setup.model)[0]))


def load_boyle(setup: Setup) -> Contestant:
    """options: workers, threads that read; packed, one record per expert."""
    notes = [] if sys.platform == "darwin" else [stub_uncached_reads()]
    import mlx.core as mx
    from boyle._runtime import apply_expert_offload, offload_stats
    from boyle.build import build_store
    from mlx_lm.utils import load_model

    store = None
    if setup.options["packed"]:
        store = setup.folder("boyle")
        if not (store / "colo.json").exists():
            build_store(setup.model, store)
    # What boyle.load() does, with the slots given instead of found from a budget that has gigabytes to spare.
    loaded, config = load_model(Path(setup.model), lazy=True)
    layers = config["num_hidden_layers"]
    wrapped = apply_expert_offload(
        loaded,
        setup.model,
        capacity_plan=[setup.slots] * layers,
        io_workers=setup.options["workers"],
        colo_dir=store and str(store),
    )
    if wrapped != layers:
        raise RuntimeError(f"boyle took over {wrapped} of {layers} layers")
    mx.eval(loaded.parameters())

    def traffic() -> dict[str, float]:
        return {name: offload_stats(loaded)[name] for name in ("hits", "misses")}

    return Contestant(mlx_lm_decode(loaded), traffic, notes)


def load_bigrig(setup: Setup) -> Contestant:
    """options: packed, one record per expert; views, resident experts as views of the file instead of slots."""
    os.environ["BIGRIG_HOME"] = str(setup.folder("bigrig"))
    os.environ["BIGRIG_VIEWS_DECODE"] = str(int(setup.options["views"]))
    from bigrig_engine.stream import ensure_packed, expert_source, load_streaming

    blob = ensure_packed(setup.model, verbose=False) if setup.options["packed"] else ""
    manifest, blob = expert_source(setup.model, blob)
    loaded, _, handle = load_streaming(
        setup.model, blob, capacity=setup.slots, manifest=manifest, threads=setup.options["threads"], verbose=False
    )

    def traffic() -> dict[str, float]:
        return {name: sum(getattr(pool, name) for pool in handle.pools) for name in ("hits", "misses")}

    return Contestant(mlx_lm_decode(loaded), traffic)


def load_amperor(setup: Setup) -> Contestant:
    """options: prefetch, as its author names it; loop, whose decoding loop."""
    notes = [] if sys.platform == "darwin" else [stub_uncached_reads()]
    import mlx.core as mx
    import mlx_lm
    from mlx_lm.models.cache import make_prompt_cache
    from strata.core import routing, runtime

    # What strata.load() does, without its search for the model in the Hugging Face cache.
    loaded = mlx_lm.load(setup.model)[0]
    folder = setup.folder("amperor")
    if (folder / "manifest.json").exists():
        store = runtime.ExpertStore(folder)
    else:
        store = runtime.ExpertStore.build_from_model(loaded, folder)
    state, _ = routing.install(loaded)
    paged = runtime.PagedRuntime(loaded, state, store, setup.slots, prefetch=setup.options["prefetch"])
    state.mode, state.delta_sigma = "none", 0.0

    def decode(prompt: list[int], tokens: int) -> Iterator[int]:
        state.reset()
        cache = make_prompt_cache(loaded)
        y = mx.array(prompt)
        for _ in range(tokens):
            y = mx.argmax(loaded(y[None], cache=cache)[:, -1, :], axis=-1)
            yield integer(y)

    def decode_as_mlx_lm(prompt: list[int], tokens: int) -> Iterator[int]:
        state.reset()
        yield from mlx_lm_decode(loaded)(prompt, tokens)

    return Contestant(
        decode_as_mlx_lm if setup.options["loop"] == "mlx_lm" else decode,
        lambda: {"misses": paged.stats["misses"], "read_seconds": paged.stats["io_s"]},
        notes,
    )


def load_ours(setup: Setup) -> Contestant:
    """options: packed, one record per expert; quantised, experts that stay as they are stored where all are in memory
    and others would be faster.
    """
    from unittest.mock import patch

    import mlx.core as mx
    import mlx.nn as nn

    from benchmarks.models import packed
    from strata_mlx import load
    from strata_mlx.engine import generate_step
    from strata_mlx.experts.streaming import streaming_of
    from strata_mlx.models import dequantised

    model = Path(setup.model)
    if setup.options.get("packed"):
        folder = setup.folder("packed")
        model = folder if folder.exists() else packed(model, folder)
    kinds = {nn.QuantizedLinear: nn.Linear} if setup.options.get("quantised") else dequantised.KINDS
    with patch.object(dequantised, "KINDS", kinds):
        loaded = load(model, slots=setup.slots)[0]
    streaming = streaming_of(loaded)

    def decode(prompt: list[int], tokens: int) -> Iterator[int]:
        for token, _ in generate_step(mx.array(prompt), loaded, max_tokens=tokens):
            yield token

    return Contestant(decode, lambda: asdict(streaming.traffic()) if streaming else {})


SYSTEMS: dict[str, Callable[[Setup], Contestant]] = {
    "mlx_lm": load_mlx_lm,
    "ours": load_ours,
    "amperor-strata": load_amperor,
    "bigrig": load_bigrig,
    "boyle": load_boyle,
}


def turn(contestant: Contestant, prompt: list[int], tokens: int) -> dict[str, Any]:
    """Decode once. ``seconds`` are on the process's own clock; ``cpu_seconds``, of all threads, and ``traffic`` are of
    the tokens after the first.
    """
    ids, seconds, cpu = [], [], 0.0
    before: dict[str, float] = {}
    for token in contestant.decode(prompt, tokens):
        ids.append(token)
        if len(ids) == 1:
            before, cpu = contestant.traffic(), time.process_time()
        seconds.append(time.perf_counter())
    cpu, after = time.process_time() - cpu, contestant.traffic()
    traffic = {name: after[name] - before[name] for name in after}
    return {"tokens": ids, "seconds": seconds, "cpu_seconds": cpu, "traffic": traffic}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # systems print to the standard output

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    setup = Setup(**json.loads(sys.argv[1]))
    try:
        contestant = SYSTEMS[setup.system](setup)
        answer({"notes": contestant.notes})
        for line in sys.stdin:
            answer(turn(contestant, **json.loads(line)))
    except Exception as error:  # whatever stops a system is its result
        answer({"error": f"{type(error).__name__}: {error}"})
        raise


if __name__ == "__main__":
    main()
