"""Measure what speculation pays with this model on this machine, and write a policy and a report.

Texts are recorded once: at every position all drafts, what the model makes of them, and the experts they touch. What a
round costs is measured with the real decoder. Then every kind of policy is replayed in virtual time: chosen on one half
of the documents, judged on the other. Nothing changes until the policy is used: 'strata_mlx generate --policy FILE'.

strata_mlx tune
strata_mlx tune --model FOLDER --memory 12GB --data notes/ prompts.jsonl --output policy.json --report policy.html
strata_mlx tune --slots 32 --storage 2
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..routing.policy import named_policy
from ..values import read_json
from .evaluate import SHARE, add_data, blocks_top_k, describe, progress
from .experts import add_memory
from .options import add_model, number

if TYPE_CHECKING:
    import mlx.nn as nn

    from ..policy import Policy
    from ..replay.costs import CostModel, Storage
    from ..replay.recording import Recording
    from ..replay.sweep import Machine, Swept
    from ..texts import Tokens

_NEEDS = {"sklearn": "scikit-learn", "matplotlib": "matplotlib", "jinja2": "jinja2"}
_LATENCY = 100e-6  # seconds, of a storage that is given by its bandwidth


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_data(parser)
    parser.add_argument("--documents", type=number(int, 4), default=32, help="how many to record, at most")
    parser.add_argument("--tokens", type=number(int, 16), default=80, help="to generate after each prompt")
    parser.add_argument(
        "--prompt-tokens", type=number(int, 2), default=32, help="of a text that is no prompt, how many begin it"
    )
    parser.add_argument("--probes", type=number(int, 16), default=32, help="runs that measure what rounds cost")
    add_memory(parser)
    parser.add_argument("--slots", type=number(int, 1), help="instead of --memory: experts of a MoE layer in memory")
    parser.add_argument("--eviction", help="which expert makes room for another; by default as in generate")
    parser.add_argument(
        "--storage",
        type=number(float, 1e-3, 1e3),
        metavar="GB/S",
        help="with --memory or --slots, tune for experts that are read at this speed; without it, as measured here",
    )
    parser.add_argument(
        "--route-policy",
        action="append",
        metavar="POLICY",
        help="a biased routing policy to price, as in evaluate; may be given several times. If it is the only one, the "
        "policy that is written holds it",
    )
    parser.add_argument(
        "--evaluation", type=Path, metavar="FILE", help="what evaluate --json printed, for the report; instead of that"
    )
    parser.add_argument(
        "--recording", type=Path, metavar="FILE", help="take the recording from this file; where there is none, keep it"
    )
    parser.add_argument("--output", type=Path, default=Path("policy.json"), help="the policy")
    parser.add_argument("--report", type=Path, default=Path("policy.html"), help="the report, a single HTML file")
    parser.add_argument("--json", action="store_true", help="print all results as one JSON object")


def run(args: argparse.Namespace) -> int:
    _check(args)
    evaluation = None if args.evaluation is None else _read_evaluation(args.evaluation)
    policies = [named_policy(text) for text in args.route_policy or ()]

    from ..loading import load
    from ..report import page
    from . import started

    begun = time.perf_counter()
    model, tokenizer = load(args.model, revision=args.revision, mtp=True, **_loading(args))
    started()
    prompts = _prompts(args, tokenizer)
    recording = _recording(args, model, tokenizer, prompts)
    costs = _costs(args, model, prompts)
    machine = _machine(args, model, costs)
    swept = _sweep(recording, machine)
    if policies:
        evaluation = _evaluate(args, model, tokenizer, policies)
    result = _result(args, model, recording, machine, swept, evaluation)
    policy = _policy(model, result, swept, policies)
    result["seconds"] = time.perf_counter() - begun
    policy.save(args.output)
    _write_report(args.report, page(result))
    if args.json:
        print(json.dumps({**result, "policy": json.loads(policy.to_json())}, allow_nan=False))
    else:
        _print(args, result)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise InputError for what would come to light only after minutes."""
    missing = [name for module, name in _NEEDS.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise InputError(f"tune needs {' and '.join(missing)}: install strata-mlx[tune]")
    if args.memory is not None and args.slots is not None:
        raise InputError("--memory and --slots both say how many experts are in memory; give one of them")
    if args.memory is None and args.slots is None:
        for name in ("storage", "eviction"):
            if getattr(args, name) is not None:
                raise InputError(f"--{name} is for experts that stay on disk: give --memory or --slots as well")
    if args.evaluation is not None and args.route_policy:
        raise InputError("--evaluation and --route-policy both price routing policies; give one of them")
    for option, path in (("--output", args.output), ("--report", args.report)):
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise InputError(f"{option} {path}: cannot be written; name a file in a folder that exists")


def _read_evaluation(path: Path) -> dict[str, Any]:
    value = read_json(path, f"--evaluation {path}")
    needed = {"name", "slots", "misses", "perplexity", "price", "price_interval", "agreement", "kl"}
    rows = value.get("rows") if isinstance(value, dict) else None
    if (
        not isinstance(rows, list)
        or not rows
        or not all(isinstance(row, dict) and needed <= row.keys() for row in rows)
    ):
        raise InputError(f"--evaluation {path}: not what 'strata_mlx evaluate --json' prints")
    assert isinstance(value, dict)
    return value


def _loading(args: argparse.Namespace) -> dict[str, Any]:
    given = {"slots": args.slots, "memory": args.memory, "eviction": args.eviction}
    options = {name: value for name, value in given.items() if value is not None}
    return {**options, "context": args.tokens + 512} if args.memory is not None else options


def _prompts(args: argparse.Namespace, tokenizer: Any) -> list[Tokens]:
    from ..texts import installed, prompts, read

    found = prompts(read(args.data) if args.data else installed(), tokenizer, args.documents, args.prompt_tokens)
    if len(found) < 4:
        raise InputError(
            f"{'--data' if args.data else 'the installed packages'}: {len(found)} documents of {args.prompt_tokens} "
            "tokens; there must be four, to fit on half of them and judge on the others: give more text"
        )
    return found


def _recording(args: argparse.Namespace, model: nn.Module, tokenizer: Any, prompts: list[Tokens]) -> Recording:
    from ..replay.recording import Recording, record

    if args.recording is not None and args.recording.exists():
        recording = Recording.load(args.recording)
        recording.check_model(model)
        return recording
    with progress("Recording", len(prompts) * (args.tokens - 1), "position", quiet=False) as report:
        recording = record(
            model,
            tokenizer,
            [prompt.ids for prompt in prompts],
            args.tokens,
            names=[prompt.name for prompt in prompts],
            report=lambda: report(1),
        )
    if len(recording.documents) < 4:
        raise InputError("the texts of all but a few prompts end at once; give other prompts")
    if args.recording is not None:
        recording.save(args.recording)
    return recording


def _costs(args: argparse.Namespace, model: nn.Module, prompts: list[Tokens]) -> CostModel:
    """Measured with this model, as it is loaded."""
    from ..experts.streaming import streaming_of
    from ..replay.costs import Probe, fit

    probe = Probe(model)
    probe.run(prompts[0].ids, args.tokens, 1)  # warms up
    probe.samples.clear()
    with progress("Measuring costs", args.probes, "run", quiet=False) as report:
        for number in range(args.probes):
            probe.run(prompts[number % len(prompts)].ids, args.tokens)
            report(1)
    return fit(None, probe) if streaming_of(model) else fit(probe, None)


def _machine(args: argparse.Namespace, model: nn.Module, costs: CostModel) -> Machine:
    from ..experts.eviction import DEFAULT_EVICTION
    from ..experts.streaming import streaming_of
    from ..models.family import text_args
    from ..models.moe import blocks
    from ..replay.sweep import Machine

    streaming = streaming_of(model)
    if streaming is None:
        if args.storage is not None:
            raise InputError("--storage: all experts find room in memory, so that none is read; give less --memory")
        return Machine(costs)
    experts, tables = text_args(model).num_experts, streaming.tables
    slots = [
        tables[layer].slots if layer in tables else experts for layer in sorted(block.layer for block in blocks(model))
    ]
    return Machine(costs, slots, args.eviction or DEFAULT_EVICTION, _storage(args.storage))


def _storage(bandwidth: float | None) -> Storage | None:
    from ..replay.costs import Storage

    return None if bandwidth is None else Storage(f"{bandwidth:g} GB/s", _LATENCY, bandwidth * 1e9)


def _sweep(recording: Recording, machine: Machine) -> Swept:
    from ..replay.sweep import replays, sweep

    with progress("Replaying policies", replays(recording.header.steps), "policy", quiet=False) as report:
        return sweep(recording, machine, lambda: report(1))


def _evaluate(args: argparse.Namespace, model: nn.Module, tokenizer: Any, policies: list[Any]) -> dict[str, Any]:
    from ..evaluation import evaluate, steps
    from ..experts.eviction import DEFAULT_EVICTION
    from ..experts.streaming import streaming_of
    from ..models.family import text_args
    from ..texts import beginnings, installed, read

    documents = beginnings(read(args.data) if args.data else installed(), tokenizer, args.documents, args.tokens)
    if len(documents) < 2:
        raise InputError(f"--route-policy: there must be two documents of {args.tokens} tokens; give more text")
    experts = text_args(model).num_experts
    slots = [None if streaming_of(model) else max(experts // SHARE, blocks_top_k(model))]
    with progress("Evaluating", steps(documents, policies, slots), "token", quiet=False) as report:
        rows = evaluate(
            model, documents, policies, slots=slots, eviction=args.eviction or DEFAULT_EVICTION, report=report
        )
    return {**describe(model, args), "experts": experts, "rows": rows}


def _result(
    args: argparse.Namespace,
    model: nn.Module,
    recording: Recording,
    machine: Machine,
    swept: Swept,
    evaluation: dict[str, Any] | None,
) -> dict[str, Any]:
    from ..models.family import text_args
    from ..replay.sweep import curves, halves

    fit, held = halves(recording)
    streamed, chosen = machine.slots is not None, swept.row(swept.chosen.kind)
    return {
        **describe(model, args),
        "experts": text_args(model).num_experts,
        "storage": machine.storage.name if machine.storage else None,
        "eviction": machine.eviction if streamed else None,
        "fit": {"documents": len(fit.documents), "positions": fit.positions},
        "held_out": {"documents": len(held.documents), "positions": held.positions},
        "recording": str(args.recording) if args.recording else None,
        "chosen": {**chosen, "pays": swept.pays},
        "recommendation": recommendation(chosen, swept.pays),
        "output": str(args.output),
        "rows": swept.rows,
        "costs": curves(machine.costs, streamed),
        "calibration": swept.reliability,
        "evaluation": evaluation,
    }


def recommendation(chosen: dict[str, Any], pays: bool) -> str:
    """In a sentence."""
    low, high = chosen["speedup_interval"]
    if pays:
        return (
            f"Use the {chosen['kind']} policy: {chosen['tokens_per_s']:.1f} tokens per second, "
            f"{chosen['speedup']:.2f} times plain decoding ({low:.2f} to {high:.2f}) on documents that it was not "
            "chosen on."
        )
    if chosen["kind"] == "plain":
        return "Nothing beats plain decoding here: do without drafts."
    if not chosen["drafted_per_token"]:
        return f"Nothing beats plain decoding here: do without drafts, as the {chosen['kind']} policy would."
    return (
        f"Nothing beats plain decoding here: do without drafts. The best way to draft, the {chosen['kind']} policy, "
        f"reaches {chosen['speedup']:.2f} times its speed ({low:.2f} to {high:.2f}) on documents that it was not "
        "chosen on."
    )


def _policy(model: nn.Module, result: dict[str, Any], swept: Swept, policies: list[Any]) -> Policy:
    from ..policy import Policy
    from ..replay.recording import fingerprint
    from ..speculation.economic import EconomicPolicy
    from ..speculation.retention import RetentionPolicy

    measured = {
        **result["measured_on"],
        **{name: result[name] for name in ("slots_of_model", "storage", "eviction", "version")},
        "speedup": result["chosen"]["speedup"] if swept.pays else 1.0,
    }
    common: dict[str, Any] = {"model": fingerprint(model, head=False), "measured_on": measured}
    common["routing"] = policies[0] if len(policies) == 1 else None
    if not swept.pays:
        return Policy(RetentionPolicy(), "off", **common)
    way = swept.chosen
    assert isinstance(way.retention, RetentionPolicy | EconomicPolicy)
    return Policy(way.retention, "on", way.steps, way.drafting, **common)


def _write_report(path: Path, text: str) -> None:
    from ..policy import write_text

    write_text(path, text, "the report")


def _print(args: argparse.Namespace, result: dict[str, Any]) -> None:
    from ..report.page import BUSY

    print(
        f"{result['fit']['documents']} documents to choose on, {result['held_out']['documents']} to judge on, "
        f"{result['fit']['positions'] + result['held_out']['positions']:,} positions; {result['seconds']:.0f} s"
    )
    print(f"\n{'kind':12}{'tokens/s':>9}{'speedup':>9}  {'of 95 %':15}{'tokens/round':>13}  policy")
    for row in result["rows"]:
        low, high = row["speedup_interval"]
        between = f"{low:.2f} to {high:.2f}"
        print(
            f"{row['kind']:12}{row['tokens_per_s']:9.1f}{row['speedup']:9.2f}  {between:15}"
            f"{row['tokens_per_round']:13.2f}  {row['policy']}"
        )
    print(f"\n{result['recommendation']}")
    error = result["costs"]["error"]
    if error is not None and error > BUSY:
        print(f"The cost model is off by {error:.0%}: the machine was busy. Measure again when it is not.")
    print(f"Written: {args.output} (strata_mlx generate --policy {args.output}) and {args.report}.")
