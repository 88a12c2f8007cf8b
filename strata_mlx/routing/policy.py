"""The routing policy: a validated value, and the one place where the rank-by-rank rule is written down.

Five kinds share one dataclass:

``moce``
    A resident's score is multiplied by a factor that depends on the rank alone. ``RoutingPolicy.tables``
    gives the factors and their inverses; the op path, the kernels and the tests take them from there.
``cache_prior``, ``max_rank``, ``mass``
    The re-rankings of *Mixture of Cache-Conditional Experts* (arXiv 2412.00099), carried out in
    ``strata_mlx.routing.additive``. ``protect`` is the paper's J.
``margin``
    A resident goes before an expert that the router weighs at most ``margin`` more. What a change of experts costs is
    the weight that it loses, and not the ratio of two weights that "moce" looks at. Where the model is sure of its next
    token, it costs the text little: with ``sure_margin``, a row's margin grows with a draft head's confidence.
"""

import argparse
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from dataclasses import fields as dataclass_fields
from functools import lru_cache
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata_mlx.errors import InputError
from strata_mlx.values import json_object, known, number

HEAD, DRAFT = 0, 1  # first axis of the tables: the kind of row
FACTOR, INVERSE = 0, 1  # second axis of the tables

KINDS = ("moce", "cache_prior", "max_rank", "mass", "margin")
_OWNER = {
    "moce_bonus": "moce",
    "r1_bonus": "moce",
    "draft_moce": "moce",
    "prior_lambda": "cache_prior",
    "max_rank": "max_rank",
    "mass": "mass",
    "margin": "margin",
    "sure_margin": "margin",
}


@dataclass(frozen=True)
class RoutingPolicy:
    """How selection prefers experts that are in memory. The weights stay the router's own whatever it says.

    Args:
        moce_bonus: log bonus of a resident; ``b = exp(moce_bonus)``. At most 0 is off.
        r1_bonus: log bonus of residents in ranks 1..protect-1; ``r = exp(r1_bonus)``. At most 0 is off.
        protect: leading ranks that the full bonus may not touch (J of the paper), 0..top_k.
        draft_moce: on draft rows use ``b * b`` and protect rank 0 only.
        kind: "moce", "cache_prior", "max_rank", "mass" or "margin".
        prior_lambda: for cache_prior, the share (>= 0) of the running logit range added to residents' logits.
        max_rank: for max_rank, the paper's M: residents among the router's top M precede others. None is off.
        mass: for mass, the paper's p in 0..1: like max_rank, with M the experts that hold this probability.
        margin: for margin, the difference of mixing weights, 0..1, that a resident makes up for; as weights that add
            up to 1 over the router's own choice.
        sure_margin: for margin, what it is, 0..1, in a row whose next token a draft head is sure of. With confidence c
            it is ``(1 - c * c) * margin + c * c * sure_margin``; a row of which no head has said anything has c = 0.
            A head's own rows have ``sure_margin``. None is ``margin`` everywhere.

    Kernels hold float32, so float32 decides: ``b``, ``b*b``, ``r`` and ``b/r`` must be finite there, which is
    stricter than in float64, and the inverse of every factor above 1 must be a normal number, since GPUs
    flush subnormal ones to zero and a weight would vanish. So ``moce_bonus`` ends at 43.66, ``r1_bonus`` at
    87.33.

    Raises:
        InputError: a value of the wrong type, NaN, infinite, out of its domain, or of another kind's field.
    """

    moce_bonus: float = 0.0
    r1_bonus: float = 0.0
    protect: int = 1
    draft_moce: bool = False
    kind: str = "moce"
    prior_lambda: float = 0.0
    max_rank: int | None = None
    mass: float = 0.0
    margin: float = 0.0
    sure_margin: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"routing policy: kind is {self.kind!r}, expected one of {', '.join(KINDS)}")
        for name in ("moce_bonus", "r1_bonus", "prior_lambda", "mass", "margin"):
            object.__setattr__(self, name, number(f"routing policy: {name}", getattr(self, name)))
        object.__setattr__(self, "protect", _count("protect", self.protect, least=0))
        if self.sure_margin is not None:
            object.__setattr__(self, "sure_margin", number("routing policy: sure_margin", self.sure_margin))
        if self.max_rank is not None:
            object.__setattr__(self, "max_rank", _count("max_rank", self.max_rank, least=1))
        if not isinstance(self.draft_moce, bool):
            raise InputError(f"routing policy: draft_moce is {self.draft_moce!r}, expected True or False")
        if self.prior_lambda < 0:
            raise InputError(f"routing policy: prior_lambda is {self.prior_lambda}, expected at least 0")
        for name in ("mass", "margin", "sure_margin"):
            if not 0 <= (getattr(self, name) or 0) <= 1:
                raise InputError(f"routing policy: {name} is {getattr(self, name)}, expected a number from 0 to 1")
        for name, kind in _OWNER.items():
            if kind != self.kind and getattr(self, name) != _DEFAULTS[name]:
                raise InputError(f"routing policy: {name} belongs to kind {kind!r}, but kind is {self.kind!r}")
        _check_scales(self.moce_bonus, self.r1_bonus)

    @property
    def active(self) -> bool:
        """Whether the policy can ever change a selection. Where it cannot, routing is exact."""
        if self.kind == "moce":
            return bool(_scale(self.moce_bonus) > 1 or (_scale(self.r1_bonus) > 1 and self.protect > 1))
        margin = max(self.margin, self.sure_margin or 0.0)
        return self.prior_lambda > 0 or self.max_rank is not None or self.mass > 0 or margin > 0

    def tables(self, top_k: int) -> NDArray[np.float32]:
        """The rule, rank by rank, as two float32 tables for each kind of row.

        Returns:
            float32 ``[2, 2, top_k]``, indexed ``[HEAD | DRAFT, FACTOR | INVERSE, rank]``. A factor multiplies
            a resident's probability to give its score when that rank is picked. An inverse multiplies the
            score of a resident that was picked at that rank to give its probability again.

        Raises:
            InputError: ``protect`` is above ``top_k``, or the kind is additive and has no factors.
        """
        self.check_top_k(top_k)
        if self.kind != "moce":
            raise InputError(f"routing policy: kind {self.kind!r} has no table of factors")
        return _tables(self, top_k).copy()

    def check_top_k(self, top_k: int) -> None:
        """Raises InputError where the policy cannot be used with ``top_k`` experts per token."""
        if _count("top_k", top_k, least=1) < self.protect:
            raise InputError(f"routing policy: protect is {self.protect}, but the router picks top_k = {top_k} experts")
        if self.max_rank is not None and self.max_rank < top_k:
            raise InputError(f"routing policy: max_rank is {self.max_rank}, expected at least top_k = {top_k}")

    def to_json(self) -> str:
        """The policy as one JSON object: ``kind`` and the fields that this kind uses, save those that are None."""
        names = ("kind", "protect", *(name for name, kind in _OWNER.items() if kind == self.kind))
        values = asdict(self)
        return json.dumps({name: values[name] for name in names if values[name] is not None})

    @classmethod
    def from_json(cls, text: str) -> "RoutingPolicy":
        """The policy that ``to_json`` wrote, or that a person did: absent fields have their defaults.

        Raises:
            InputError: not a JSON object, an unknown or repeated key, or a value that the policy refuses.
        """
        return cls(**known("routing policy", json_object("routing policy", text), cls))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> "RoutingPolicy":
        """The policy of kind "moce" that the ``STRATA_METAL_*`` variables describe.

        Raises:
            InputError: a value that is malformed or refused; the message names the variable.
        """
        environ = os.environ if environ is None else environ
        values = {}
        for variable, (name, parse) in _VARIABLES.items():
            if variable in environ:
                try:
                    values[name] = parse(environ[variable])
                    cls(**{name: values[name]})
                except ValueError as error:
                    raise InputError(f"{variable}={environ[variable]!r}: {error}") from None
        try:
            return cls(**values)
        except InputError as error:  # each is fine, together they are not
            raise InputError(f"{', '.join(v for v in _VARIABLES if v in environ)}: {error}") from None

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Adds the flags that ``from_args`` reads."""
        group = parser.add_argument_group("routing", "prefer experts that are in memory")
        group.add_argument("--moce-bonus", type=float, help="log bonus of resident experts (0: off)")
        group.add_argument("--r1-bonus", type=float, help="log bonus of residents in ranks 1..protect-1 (0: off)")
        group.add_argument("--protect", type=int, help="leading ranks that the full bonus may not touch")
        group.add_argument("--draft-moce", action=argparse.BooleanOptionalAction, help="double it on draft rows")
        group.add_argument(
            "--route-policy",
            metavar="POLICY",
            help='a JSON file, JSON text, or "moce"; replaces the environment',
        )

    @classmethod
    def from_args(cls, args: argparse.Namespace, environ: Mapping[str, str] | None = None) -> "RoutingPolicy":
        """The policy of a command line: flags over ``--route-policy``, or over the environment.

        Raises:
            InputError: as ``from_env`` and ``from_json``, or a policy file that cannot be read.
        """
        base = cls.from_env(environ) if args.route_policy is None else named_policy(args.route_policy)
        flags = ("moce_bonus", "r1_bonus", "protect", "draft_moce")
        given = {name: getattr(args, name) for name in flags if getattr(args, name) is not None}
        return replace(base, **given)

    def __str__(self) -> str:
        settings = ", ".join(f"{k} {v}" for k, v in json.loads(self.to_json()).items() if k != "kind")
        return f"{self.kind} ({settings})" if self.active else "exact (no residency bonus)"


_DEFAULTS: Mapping[str, Any] = {field.name: field.default for field in dataclass_fields(RoutingPolicy)}


def _switch(text: str) -> bool:
    if text.lower() not in ("0", "1", "false", "true", "off", "on", "no", "yes"):
        raise ValueError("expected 0 or 1")
    return text.lower() in ("1", "true", "on", "yes")


_VARIABLES: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "STRATA_METAL_MOCE_BONUS": ("moce_bonus", float),
    "STRATA_METAL_R1_BONUS": ("r1_bonus", float),
    "STRATA_METAL_MOCE_PROTECT": ("protect", int),
    "STRATA_METAL_DRAFT_MOCE": ("draft_moce", _switch),
}


def named_policy(text: str) -> RoutingPolicy:
    """What ``--route-policy`` means: JSON text, a kind that needs no parameter, or else a file."""
    if text.lstrip().startswith("{"):
        return RoutingPolicy.from_json(text)
    if text == "moce":
        return RoutingPolicy()
    if text in KINDS:
        raise InputError(f'--route-policy {text}: does nothing alone; give JSON, as {{"kind": "{text}", ...}}')
    try:
        content = Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--route-policy {text}: not a policy file, JSON or a kind ({error})") from None
    try:
        return RoutingPolicy.from_json(content)
    except InputError as error:
        raise InputError(f"--route-policy {text}: {error}") from None


def _factors(m: np.float32, r: np.float32, protect: int, top_k: int) -> NDArray[np.float32]:
    """What multiplies a resident at each rank. This loop is the rule; nothing else repeats it."""
    r1_active = r > 1 and protect > 1
    factors = np.ones(top_k, np.float32)
    for rank in range(1, top_k):
        if rank >= protect and m > 1:
            factors[rank] = m
        elif r1_active:  # also past the protected ranks: without a full bonus the tail keeps r
            factors[rank] = r
    return factors


@lru_cache
def _tables(policy: RoutingPolicy, top_k: int) -> NDArray[np.float32]:
    b, r = _scale(policy.moce_bonus), _scale(policy.r1_bonus)
    head = _factors(b, r, policy.protect, top_k)
    draft = _factors(b * b, r, 1, top_k) if policy.draft_moce else head
    return np.stack([[factors, np.float32(1) / factors] for factors in (head, draft)])


def _scale(bonus: float) -> np.float32:
    """exp(bonus) as the kernels hold it."""
    with np.errstate(over="ignore", under="ignore"):
        return np.float32(np.exp(np.float64(bonus)))


def _check_scales(moce_bonus: float, r1_bonus: float) -> None:
    b, r = _scale(moce_bonus), _scale(r1_bonus)
    with np.errstate(all="ignore"):
        products = {"b = exp(moce_bonus)": b, "b * b": b * b, "r = exp(r1_bonus)": r, "b / r": b / r}
    settings = f"moce_bonus {moce_bonus}, r1_bonus {r1_bonus}"
    for name, value in products.items():
        if not np.isfinite(value):
            raise InputError(f"routing policy: {name} is not finite in float32 ({settings}); use a smaller bonus")
    if max(b, b * b, r) > 1 / np.finfo(np.float32).tiny:
        raise InputError(f"routing policy: a scale's inverse is below float32's normal range ({settings})")


def _count(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise InputError(f"routing policy: {name} is {value!r}, expected a whole number, at least {least}")
    return int(value)
