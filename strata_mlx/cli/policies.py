"""Options that say how to speculate and route, and the policy that they come to."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..policy import Policy
from ..routing import RoutingPolicy
from ..speculation.retention import RetentionPolicy
from .options import number

_RETENTION = ("spec_min_p", "spec_min_p_schedule", "spec_min_cum_p")
_ROUTING = ("moce_bonus", "r1_bonus", "protect", "draft_moce", "route_policy")


def add_policy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mtp",
        nargs="?",
        choices=("on", "off", "auto"),
        const="on",
        help="draft with the model's MTP head: in every round (no value needed), never, or (auto) as long as it pays "
        "by the clock, which is off where --seed must repeat a sampled text; by default as --policy says, or auto",
    )
    parser.add_argument("--no-mtp", dest="mtp", action="store_const", const="off", help="as --mtp off")
    parser.add_argument(
        "--mtp-max-steps",
        type=number(int, 1, 8),
        help="drafts in a round; by default as --policy says, or 3 on the CPU, else 4",
    )
    parser.add_argument(
        "--drafting",
        choices=("chained", "stepwise"),
        help="make all drafts in one evaluation, or each in its own, to stop where the floors below do; by default as "
        "--policy says, or chained",
    )
    parser.add_argument(
        "--policy",
        type=Path,
        metavar="FILE",
        help="speculate and route as a file from 'strata_mlx tune' says; options that are given go before it",
    )
    RetentionPolicy.add_arguments(parser)


def chosen_policy(args: argparse.Namespace) -> Policy:
    """What --policy says, or what is usual, with the options that are given in its place."""
    policy = Policy() if args.policy is None else _load_policy(args.policy)
    if args.policy is None or _given(args, _RETENTION):
        policy = replace(policy, retention=RetentionPolicy.from_args(args))
    if policy.routing is None or _given(args, _ROUTING):
        policy = replace(policy, routing=RoutingPolicy.from_args(args))
    given = {"mtp": args.mtp, "max_steps": args.mtp_max_steps, "drafting": args.drafting}
    return replace(policy, **{name: value for name, value in given.items() if value is not None})


def _load_policy(file: Path) -> Policy:
    try:
        return Policy.load(file)
    except InputError as error:
        raise InputError(f"--policy {error}") from None


def _given(args: argparse.Namespace, names: Sequence[str]) -> bool:
    return any(getattr(args, name) is not None for name in names)


def check_policy(file: Path, policy: Policy, model: Any) -> None:
    """Raise InputError where the policy is for another model; say where it is only for another machine."""
    try:
        differences = policy.check_model(model)
    except InputError as error:
        raise InputError(f"--policy {file}: {error}") from None
    if differences and sys.stderr:
        print(
            f"warning: --policy {file} was measured elsewhere ({'; '.join(differences)}): it may not be the fastest "
            "here, and 'strata_mlx tune' finds out",
            file=sys.stderr,
        )
