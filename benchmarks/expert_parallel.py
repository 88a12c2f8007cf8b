"""Do several ranks give the text of one, do they read less, and what goes over the wire for that?

    python benchmarks/expert_parallel.py [--json] [--ranks 1,2,4]
    python benchmarks/expert_parallel.py --backend nccl --ranks 1,2 --dtype float32

Processes on this machine decode the same held-out prompts greedily, plainly and with the MTP head, each with --slots
slots for its share of every layer's experts. A text may leave that of one rank only at a token whose best two logits
lie closer together than 1e-4. Misses are of all ranks together.

The least that a rank must send for each token and layer, so that all have the sum of n parts of D numbers, is
2 (n - 1) / n D numbers (Patarasuk and Yuan, 2009). The wire is timed in three ways: what an exchange of a layer takes
where it comes upon another (back to back), what it takes in decoding, where each rank waits for the slowest (in place),
and what plain TCP takes for the same bytes from one process to the next and back, half of it (a message).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import heldout, report
from strata_mlx import expert_parallel, load, stream_generate
from strata_mlx.device import DTYPES, compute_dtype_of
from strata_mlx.models.family import text_args
from strata_mlx.models.moe import blocks
from strata_mlx.parallel.ranks import Ranks

PROMPT_TOKENS = 32
GAP = 1e-4  # between the best two logits, below which either may come
REPEATS = 200  # exchanges back to back
TIMED = 16  # tokens that are decoded with every exchange waited for
BACKENDS = ("ring", "nccl")
PATIENCE = 3600.0  # seconds


def decode(model: nn.Module, tokenizer: Any, prompt: list[int], tokens: int, mtp: bool) -> dict[str, Any]:
    """The tokens after a prompt, the gaps of the best two logits at each, and what was read and sent for them."""
    ids: list[int] = []
    gaps: list[float] = []
    seen = [(0, 0)]

    def counters() -> tuple[int, int]:
        wire = getattr(model, "wire", None)
        return model.streaming.traffic().misses, wire.bytes if wire else 0

    def progress(read: int, _: int) -> None:
        if read < len(prompt):  # the last time, all of it but what gives the first token
            seen[0] = counters()

    options: dict[str, Any] = {"mtp": mtp, "prompt_progress_callback": progress}
    for response in stream_generate(model, tokenizer, prompt, tokens, **options):
        ids.append(response.token)
        best = np.partition(np.array(response.logprobs.astype(mx.float32)), -2)[-2:]
        gaps.append(float(best[1] - best[0]))
    misses, sent = (now - before for now, before in zip(counters(), seen[0], strict=True))
    speed = response.generation_tps
    return {"tokens": ids, "gaps": gaps, "tokens_per_second": speed, "misses": misses, "bytes": sent}


def worker(args: argparse.Namespace) -> dict[str, Any] | None:
    """What one rank does; rank 0 returns what was found."""
    with expert_parallel(timeout=args.rank_timeout) as ranks:
        options: dict[str, Any] = {"ranks": ranks} if ranks.size > 1 else {}
        model, tokenizer = load(args.model, mtp=True, slots=args.slots, dtype=args.dtype, **options)
        prompts = heldout.windows(tokenizer, args.prompts, PROMPT_TOKENS)
        decode(model, tokenizer, prompts[0], 4, True)
        found: dict[str, Any] = {"ranks": ranks.size, "layers": len(model.streaming.layers)}
        for name, mtp in (("plain", False), ("mtp", True)):
            texts = [decode(model, tokenizer, prompt, args.tokens, mtp) for prompt in prompts]
            misses = ranks.exchange([text["misses"] for text in texts])
            found[name] = {"texts": texts, "misses": misses}
        found["wire"] = wire(model, tokenizer, prompts[0], ranks) if ranks.size > 1 else None
        return found if ranks.leads else None


def wire(model: nn.Module, tokenizer: Any, prompt: list[int], ranks: Ranks) -> dict[str, float]:
    """Milliseconds of an exchange of one row: both ways back to back, and in place."""
    size = text_args(model).hidden_size
    row = mx.ones((1, 1, size), DTYPES[compute_dtype_of(model)])
    mx.eval(row)
    gather = back_to_back(lambda: mx.distributed.all_gather(row, group=ranks.group).sum(axis=0))
    reduce = back_to_back(lambda: mx.distributed.all_sum(row, group=ranks.group))
    with timed(model) as seconds:
        for response in stream_generate(model, tokenizer, prompt, TIMED, mtp=False):
            if response.generation_tokens == 1:
                seconds.clear()
    return {
        "row_bytes": row.nbytes,
        "gather_ms": 1e3 * gather,
        "reduce_ms": 1e3 * reduce,
        "in_place_ms": 1e3 * statistics.mean(seconds),
    }


def back_to_back(exchange: Callable[[], mx.array]) -> float:
    """Seconds of one of REPEATS, the median."""
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        mx.eval(exchange())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


@contextmanager
def timed(model: nn.Module) -> Iterator[list[float]]:
    """Have every exchange of ``model`` waited for, and its seconds collected."""
    seconds: list[float] = []

    def waiting(across: Callable[[mx.array], mx.array]) -> Callable[[mx.array], mx.array]:
        def exchange(part: mx.array) -> mx.array:
            mx.eval(part)
            start = time.perf_counter()
            total = across(part)
            mx.eval(total)
            seconds.append(time.perf_counter() - start)
            return total

        return exchange

    layers = blocks(model)
    originals = [block.across for block in layers]
    for block, across in zip(layers, originals, strict=True):
        assert across is not None
        block.across = waiting(across)
    try:
        yield seconds
    finally:
        for block, across in zip(layers, originals, strict=True):
            block.across = across


def _echo(listening: socket.socket, nbytes: int) -> None:
    connection, _ = listening.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while data := connection.recv(nbytes, socket.MSG_WAITALL):
        connection.sendall(data)


def message(nbytes: int) -> float:
    """Milliseconds of ``nbytes`` over TCP from one process of this machine to another: half of there and back."""
    listening = socket.create_server(("127.0.0.1", 0))
    other = multiprocessing.get_context("fork").Process(target=_echo, args=(listening, nbytes), daemon=True)
    other.start()
    seconds, data = [], b"x" * nbytes
    with socket.create_connection(listening.getsockname()) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(REPEATS):
            start = time.perf_counter()
            connection.sendall(data)
            connection.recv(nbytes, socket.MSG_WAITALL)
            seconds.append(time.perf_counter() - start)
    other.join()
    listening.close()
    return 1e3 * statistics.median(seconds) / 2


def measure(ranks: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start so many ranks of this script and return what rank 0 found."""
    (port,), hosts = report.free_ports(1), report.ring_hosts(ranks, folder)
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", *sys.argv[1:]]
    processes = []
    for rank in range(ranks):
        environment = {**report.environment(), "MLX_RANK": str(rank)}
        if ranks == 1:
            environment.pop("MLX_RANK")
        elif args.backend == "ring":
            environment["MLX_HOSTFILE"] = str(hosts)
        else:
            environment |= {"NCCL_HOST_IP": "127.0.0.1", "NCCL_PORT": str(port), "MLX_WORLD_SIZE": str(ranks)}
            environment["CUDA_VISIBLE_DEVICES"] = str(rank)
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    for rank, process in enumerate(processes):
        if process.returncode:
            raise RuntimeError(f"rank {rank} of {ranks} has ended with code {process.returncode}")
    return json.loads(outputs[0].splitlines()[-1])


def compared(texts: list[dict[str, Any]], expected: list[dict[str, Any]]) -> dict[str, int]:
    """Tokens that are compared, up to the first that differs in each text, and the differences by their gap."""
    count = {"compared": 0, "close_calls": 0, "differences": 0}
    for text, reference in zip(texts, expected, strict=True):
        for token, other, gap in zip(text["tokens"], reference["tokens"], reference["gaps"], strict=True):
            count["compared"] += 1
            if token != other:
                count["close_calls" if gap < GAP else "differences"] += 1
                break
    return count


def row_of(found: dict[str, Any], alone: dict[str, Any], way: str, hidden_bytes: int) -> dict[str, Any]:
    """What so many ranks came to in one way of decoding."""
    texts, ranks = found[way]["texts"], found["ranks"]
    tokens = sum(len(text["tokens"]) for text in texts)
    sent = sum(text["bytes"] for text in texts) / tokens
    least = 2 * (ranks - 1) / ranks * hidden_bytes * (found["layers"] - 1)
    return {
        "ranks": ranks,
        "decoding": way,
        **compared(texts, alone[way]["texts"]),
        "misses_per_token": sum(map(sum, found[way]["misses"])) / tokens,
        "tokens_per_second": statistics.harmonic_mean([text["tokens_per_second"] for text in texts]),
        "sent_bytes_per_token": sent,
        "least_bytes_per_token": least,
        "sent_to_least": sent / least if least else None,
    }


def wire_row(found: dict[str, Any], message_ms: float) -> dict[str, Any]:
    wire, trunk = found["wire"], found["layers"] - 1
    return {
        "ranks": found["ranks"],
        **wire,
        "message_ms": message_ms,
        "layers": trunk,
        "gather_ms_per_token": trunk * wire["gather_ms"],
        "in_place_ms_per_token": trunk * wire["in_place_ms"],
        # A ring takes n - 1 steps to gather, each of which is one message between neighbours, all at the same time.
        "least_ms_per_token": trunk * (found["ranks"] - 1) * message_ms,
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        found = [measure(ranks, args, Path(folder)) for ranks in args.ranks]
    alone = found[0]
    row_bytes = next((each["wire"]["row_bytes"] for each in found if each["wire"]), 0)
    rows = [row_of(each, alone, way, row_bytes) for way in ("plain", "mtp") for each in found]
    message_ms = message(row_bytes) if row_bytes else 0.0
    return {
        "backend": args.backend,
        "device": mx.default_device().type.name,
        "cores": os.cpu_count(),
        "mlx": version("mlx"),
        "slots_per_rank": args.slots,
        "prompts": args.prompts,
        "tokens": args.tokens,
        "dtype": args.dtype,
        "differences": sum(row["differences"] for row in rows),
        "decoding": rows,
        "wire": [wire_row(each, message_ms) for each in found if each["wire"]],
    }


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--backend", choices=BACKENDS, default="ring", help="what the ranks talk through")
    parser.add_argument(
        "--ranks",
        type=lambda text: [int(count) for count in text.split(",")],
        default=[1, 2, 4],
        metavar="N,...",
        help="how many, each in turn; the first must be 1",
    )
    parser.add_argument("--model", help="a folder; by default the embedded model")
    parser.add_argument("--dtype", default="auto", choices=("auto", *DTYPES), help="to compute in")
    parser.add_argument("--slots", type=int, default=16, help="of each layer, at each rank")
    parser.add_argument("--prompts", type=int, default=4, help="held-out prompts")
    parser.add_argument("--tokens", type=int, default=48, help="tokens for each of them")
    parser.add_argument("--rank-timeout", type=float, default=120.0, help="seconds of silence of a rank")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(worker(args)))
        return
    if args.ranks[0] != 1:
        parser.error("--ranks begins with 1, which the others are compared with")
    result = run(args)
    if report.publish(result, args):
        return
    print(f"{result['slots_per_rank']} slots of a layer at each rank, {result['backend']}")
    print(f"differences from one rank above a gap of {GAP:g}: {result['differences']}\n")
    print(report.table(result["decoding"], tuple(result["decoding"][0])))
    print()
    if result["wire"]:
        print(report.table(result["wire"], tuple(result["wire"][0])))


if __name__ == "__main__":
    main()
