"""Check that speculation changes nothing: greedy text, the state of every cache, and the law of sampled tokens.

    python benchmarks/speculation_exactness.py [--json]

Greedy: held-out prompts, decoded plainly and under every policy, drafting path and chain length; differences count
where the trunk's two best logits are more than 1e-4 apart, and the others are listed. Caches: after every accepted
length of a window of eight. Sampled: rounds drawn from a small-vocabulary model, against the enumerated law of accepted
length and tokens, for a batch of sequences with different contexts. All in float32, unless --weights embedded leaves
the embedded model as it is, which is what kernels are made for. The full grid takes hours on two cores: --jobs spreads
the prompts over processes, --configurations lets each prompt take that many of them in turn.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from itertools import islice, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ArraysCache
from numpy.typing import NDArray
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import heldout, report
from benchmarks.models import embedded_as_float32
from strata_mlx import RetentionPolicy, SpeculativeDecoder, load
from strata_mlx.engine import generate_step
from strata_mlx.hub import EMBEDDED
from strata_mlx.models.trunk import Trunk
from strata_mlx.prefill import make_cache
from strata_mlx.speculation.acceptance import accept_sampled
from strata_mlx.speculation.draft import MAX_STEPS, MTPDrafter
from strata_mlx.speculation.retention import PATHS
from strata_mlx.speculation.window import Window
from tests.speculation.reference import chi_square_p, keep_probability, residual
from tests.tiny import make_checkpoint

GAP = 1e-4  # two logits closer than this may swap when sums are taken in another order
PROMPT_TOKENS = 32
POLICIES = {
    "flat": RetentionPolicy(0.35),
    "schedule": RetentionPolicy(schedule=(0.10, 0.35, 0.55)),
    "cumulative": RetentionPolicy(min_cum_p=0.25),
    "both": RetentionPolicy(schedule=(0.10, 0.35, 0.55), min_cum_p=0.20),
    "every draft": RetentionPolicy(),
}
CONFIGURATIONS = [  # without gates, both ways of drafting are the same
    (policy, drafting, steps)
    for policy, drafting, steps in product(POLICIES, PATHS, (1, 3, 7, MAX_STEPS))
    if drafting == "chained" or not POLICIES[policy].keeps_all
]
VOCABULARY, DRAFTS, SEQUENCES = 5, 2, 4  # of the sampled check
Floats = NDArray[np.float64]


def greedy(weights: Path, prompts: list[list[int]], tokens: int, per_prompt: int, jobs: int) -> dict[str, Any]:
    """A prompt counts up to the first position where the texts part."""
    differences, compared, rows = [], 0, Counter[str]()
    check = partial(check_prompt, weights, mx.default_device().type.name, tokens, per_prompt)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        checked = pool.map(check, range(len(prompts)), prompts)
        for parted, same, counts in tqdm(checked, total=len(prompts), desc="Greedy", unit="prompt"):
            differences += parted
            compared += same
            rows += counts
    return {
        "mismatches": sum(difference["gap"] > GAP for difference in differences),
        "within_gap": [difference for difference in differences if difference["gap"] <= GAP],
        "tokens_compared": compared,
        "rounds": rows["rounds"],
        "drafted": rows["drafted"],
        "retained": rows["retained"],
        "accepted": rows["accepted"],
    }


def check_prompt(
    weights: Path, device: str, tokens: int, per_prompt: int, number: int, prompt: list[int]
) -> tuple[list[dict[str, Any]], int, Counter[str]]:
    """Where the speculative texts of one prompt part from the plain one, tokens compared, and what was drafted."""
    mx.set_default_device(mx.Device(getattr(mx, device)))
    model = loaded(weights)
    differences, compared, rows = [], 0, Counter[str]()
    plain = list(generate_step(mx.array(prompt), model, max_tokens=tokens))
    for index in range(number * per_prompt, (number + 1) * per_prompt):
        policy, drafting, steps = CONFIGURATIONS[index % len(CONFIGURATIONS)]
        decoder = SpeculativeDecoder(
            model, prompt=prompt, max_tokens=tokens, retention=POLICIES[policy], drafting=drafting, max_steps=steps
        )
        for position, (token, (expected, logprobs)) in enumerate(zip(decoder, plain, strict=True)):
            compared += 1
            if token.token != expected:
                second, best = np.sort(np.array(logprobs))[-2:].tolist()
                where = {"prompt": number, "position": position, "gap": best - second}
                differences.append({**where, "policy": policy, "drafting": drafting, "max_steps": steps})
                break
        rows += Counter(decoder.summary.to_dict())
    return differences, compared, rows


@cache
def loaded(weights: Path) -> nn.Module:
    """The model of this process."""
    return load(weights, mtp=True)[0]


def caches(model: nn.Module, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """The largest difference from plain decoding after 0 to 7 accepted drafts of a window of eight rows."""
    trunk, rows = Trunk(model), []
    for accepted in tqdm(range(MAX_STEPS), desc="Caches", unit="length"):
        largest = {"convolution": 0.0, "recurrent": 0.0, "keys_values": 0.0, "mtp": 0.0}
        for prompt in prompts:
            text = [token for token, _ in generate_step(mx.array(prompt), model, max_tokens=accepted + 2)]
            drafts = [*text[1 : accepted + 1], *((np.arange(MAX_STEPS) * 37 + 11) % 8000).tolist()]
            cache, expected = make_cache(model), make_cache(model)
            trunk(mx.array(prompt)[None], cache)
            trunk(mx.array(prompt)[None], expected)
            window = Window(cache, MAX_STEPS)
            trunk(mx.array([text[0], *drafts[: MAX_STEPS - 1]])[None], window.layers)
            window.commit(accepted + 1)
            for token in text[: accepted + 1]:
                mx.eval(trunk(mx.array([[token]]), expected))
            for kind, a, b in pairs(cache, expected):
                largest[kind] = max(largest[kind], float(mx.abs(a - b).max().item()))  # type: ignore[arg-type]
            largest["mtp"] = max(largest["mtp"], head_difference(model, prompt, accepted + 2))
        rows.append({"accepted": accepted, **largest})
    return rows


def pairs(cache: list[Any], expected: list[Any]) -> Iterator[tuple[str, mx.array, mx.array]]:
    for layer, other in zip(cache, expected, strict=True):
        if isinstance(layer, ArraysCache):
            yield "convolution", layer[0], other[0]
            yield "recurrent", layer[1], other[1]
        else:
            both = zip(layer.keys_and_values(), other.keys_and_values(), strict=True)
            yield from (("keys_values", a, b) for a, b in both)


def head_difference(model: nn.Module, prompt: list[int], tokens: int) -> float:
    """Of the head's keys and values after rounds with a chain of eight, from those of one forward over the text."""
    head, trunk = MTPDrafter(model), Trunk(model)
    decoder = SpeculativeDecoder(model, prompt=prompt, max_tokens=-1, max_steps=MAX_STEPS, drafter=head)
    text = mx.array([*prompt, *(token.token for token in islice(decoder, tokens))])[None]
    decoder.close()
    head.catch_up()
    cache = MTPDrafter(model).cache
    model.mtp(trunk.embed(text[:, 1:]), trunk(text[:, :-1], make_cache(model)).after, cache)
    length = min(cache[0].offset, head.cache[0].offset)
    both = zip(head.cache[0].keys_and_values(), cache[0].keys_and_values(), strict=True)
    return max(float(mx.abs(a[..., :length, :] - b[..., :length, :]).max().item()) for a, b in both)  # type: ignore[arg-type]


def laws(folder: Path) -> tuple[Floats, Floats]:
    """p ``[S, V + 1, V + 1, V]`` of a random model's trunk, q ``[S, V + 1, V]`` of its head: after the context of each
    sequence and up to two, or one, more tokens, where index V stands for no token.
    """
    model, _ = load(make_checkpoint(folder, "qwen3_next", "stacked", mtp="stacked", vocab_size=VOCABULARY), mtp=True)
    trunk = Trunk(model)
    p = np.zeros((SEQUENCES, VOCABULARY + 1, VOCABULARY + 1, VOCABULARY))
    q = np.zeros((SEQUENCES, VOCABULARY + 1, VOCABULARY))
    for sequence in range(SEQUENCES):
        context = [(sequence * 3 + i * i) % VOCABULARY for i in range(6)]
        for drafts in [(), *((a,) for a in range(VOCABULARY)), *product(range(VOCABULARY), repeat=2)]:
            hidden = trunk(mx.array([*context, *drafts])[None], make_cache(model)).after
            law = np.array(mx.softmax(3 * trunk.logits(hidden)[0, -1])).astype(np.float64)
            p[sequence][tuple([*drafts, VOCABULARY, VOCABULARY][:2])] = law
        hidden = trunk(mx.array(context[:-1])[None], make_cache(model)).after
        first = model.mtp(trunk.embed(mx.array(context[1:])[None]), hidden)
        q[sequence, VOCABULARY] = np.array(mx.softmax(2 * trunk.logits(first)[0, -1]))
        for draft in range(VOCABULARY):
            states = mx.concatenate([hidden, first[:, -1:]], axis=1)
            second = model.mtp(trunk.embed(mx.array([*context[1:], draft])[None]), states)
            q[sequence, draft] = np.array(mx.softmax(2 * trunk.logits(second)[0, -1]))
    return p / p.sum(-1, keepdims=True).clip(1e-30), q / q.sum(-1, keepdims=True)


def enumerate_law(p: Floats, q: Floats) -> dict[tuple[int, ...], float]:
    """Probability of each outcome of one sequence: accepted length, committed tokens. p, q as from laws(), of one."""
    none, law = VOCABULARY, Counter[tuple[int, ...]]()
    rows = [p[none, none]], [p[a, none] for a in range(VOCABULARY)]
    for a, b in product(range(VOCABULARY), repeat=2):
        drawn = q[none, a] * q[a, b]
        keep = keep_probability(rows[0][0], q[none], a), keep_probability(rows[1][a], q[a], b)
        for token in range(VOCABULARY):
            law[0, token] += drawn * (1 - keep[0]) * residual(rows[0][0], q[none])[token]
            law[1, a, token] += drawn * keep[0] * (1 - keep[1]) * residual(rows[1][a], q[a])[token]
            law[2, a, b, token] += drawn * keep[0] * keep[1] * p[a, b, token]
    return {outcome: float(probability) for outcome, probability in law.items() if probability > 0}


def sampled(folder: Path, draws: int, seeds: int) -> list[dict[str, Any]]:
    """p-values of ``draws`` rounds of a batch of sequences, for each of them against its own law."""
    p, q = laws(folder)
    with np.errstate(divide="ignore"):
        log_p, log_q = (mx.array(np.log(law).astype(np.float32)) for law in (p, q))
    rows, sequences = [], mx.arange(SEQUENCES)[None]
    expected = [enumerate_law(p[i], q[i]) for i in range(SEQUENCES)]
    for seed in tqdm(range(1, seeds + 1), desc="Sampled", unit="seed"):
        counts = [Counter[tuple[int, ...]]() for _ in range(SEQUENCES)]
        mx.random.seed(seed)
        for start in range(0, draws, 50_000):
            batch = min(50_000, draws - start)
            none = mx.full((batch, SEQUENCES), VOCABULARY)
            a = mx.random.categorical(log_q[sequences, none])
            b = mx.random.categorical(log_q[sequences, a])
            trunk = mx.stack([log_p[sequences, none, none], log_p[sequences, a, none], log_p[sequences, a, b]], axis=2)
            head = mx.stack([log_q[sequences, none], log_q[sequences, a]], axis=2)
            drafts = mx.stack([a, b], axis=2)  # [batch, S, k]
            outcome = accept_sampled(drafts, trunk, head)
            accepted, drawn, token = (np.array(x).astype(int) for x in (outcome.accepted, drafts, outcome.token))
            for i in range(SEQUENCES):
                counts[i] += tally(accepted[:, i], drawn[:, i], token[:, i])
        for i in range(SEQUENCES):
            rows.append({"seed": seed, "sequence": i, "draws": draws, "p": chi_square_p(counts[i], expected[i])})
    return rows


def tally(accepted: Any, drafts: Any, tokens: Any) -> Counter[tuple[int, ...]]:
    """How often each outcome was drawn."""
    codes = np.stack([accepted, *(np.where(i < accepted, drafts[:, i], -1) for i in range(DRAFTS)), tokens], axis=1)
    outcomes, counts = np.unique(codes, axis=0, return_counts=True)
    return Counter({tuple(x for x in o if x >= 0): int(n) for o, n in zip(outcomes.tolist(), counts, strict=True)})


def run(work: Path, args: Any) -> dict[str, Any]:
    weights = EMBEDDED if args.weights == "embedded" else embedded_as_float32(work / "float32")
    model, tokenizer = load(weights, mtp=True)
    prompts = heldout.windows(tokenizer, args.prompts, PROMPT_TOKENS)
    result = greedy(weights, prompts, args.tokens, args.configurations, args.jobs)
    states = caches(model, prompts[: args.cache_prompts])
    laws_drawn = sampled(work / "small", args.draws, args.seeds)
    return {
        **result,
        "weights": args.weights,
        "device": mx.default_device().type.name,
        "prompts": args.prompts,
        "configurations_per_prompt": args.configurations,
        "largest_cache_difference": max(max(v for k, v in row.items() if k != "accepted") for row in states),
        "caches": states,
        "least_p": min(row["p"] for row in laws_drawn),
        "sampled": laws_drawn,
    }


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--prompts", type=int, default=200, help="held-out prompts")
    parser.add_argument("--tokens", type=int, default=128, help="tokens for each of them")
    parser.add_argument("--configurations", type=int, default=len(CONFIGURATIONS), help="of all, for each prompt")
    parser.add_argument("--weights", choices=("float32", "embedded"), default="float32")
    parser.add_argument("--jobs", type=int, default=1, help="processes that the prompts are spread over")
    parser.add_argument("--device", choices=("cpu", "gpu"), help="by default MLX's own choice")
    parser.add_argument("--cache-prompts", type=int, default=10, help="prompts whose caches are compared")
    parser.add_argument("--draws", type=int, default=1_000_000, help="rounds that are sampled for each seed")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    if args.device:
        mx.set_default_device(mx.Device(getattr(mx, args.device)))
    with tempfile.TemporaryDirectory() as folder:
        result = run(Path(folder), args)
    if report.publish(result, args):
        return
    print(f"tokens compared {result['tokens_compared']}, mismatches {result['mismatches']}, ", end="")
    print(f"differences within the gap {len(result['within_gap'])}\n")
    print(report.table(result["caches"], tuple(result["caches"][0])), end="\n\n")
    print(report.table(result["sampled"], ("seed", "sequence", "draws", "p")))


if __name__ == "__main__":
    main()
