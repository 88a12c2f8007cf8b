"""How to decode with a model on a machine: what ``strata_mlx tune`` has found out, as one file.

    {"format": "strata-mlx policy", "version": 1, "mtp": "on", "max_steps": 7, "drafting": "chained",
     "retention": {"kind": "economic", ...} or {"min_p": 0.5, ...}, "routing": null or {"kind": "moce", ...},
     "model": null or {"name": ..., "sha256": ...}, "measured_on": {"machine": ..., ...}}

Needs no MLX, so that it can be made and read anywhere; check_model() alone does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import Fault, InputError
from .folders import write_whole
from .routing.policy import RoutingPolicy
from .speculation.calibration import MAX_POSITIONS
from .speculation.economic import KIND, EconomicPolicy
from .speculation.retention import PATHS, RetentionPolicy
from .values import json_object, known

if TYPE_CHECKING:
    import mlx.nn as nn

FORMAT, VERSION = "strata-mlx policy", 1
MTP = ("on", "off", "auto")
_REQUIRED = ("mtp", "retention")


@dataclass(frozen=True)
class Policy:
    """Whether and how to speculate, and how to route.

    mtp: "on" drafts in every round that the retention policy wants, "off" never, "auto" as long as it pays by the
    clock. retention: which drafts are verified. max_steps: drafts of a round, 1 to 8; None is the default. drafting:
    "chained" or "stepwise". routing: None leaves it exact. model: the one that it is for, from
    replay.recording.fingerprint() without the head; None is any. measured_on: machine, device and versions on which it
    was measured, and what else is worth knowing; nothing follows from it.

    Raises:
        InputError: a value of the wrong type or out of its range.
    """

    retention: RetentionPolicy | EconomicPolicy = field(default_factory=RetentionPolicy)
    mtp: str = "auto"
    max_steps: int | None = None
    drafting: str = "chained"
    routing: RoutingPolicy | None = None
    model: Mapping[str, str] | None = None
    measured_on: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.retention, RetentionPolicy | EconomicPolicy):
            raise InputError("policy: retention must be a RetentionPolicy or an EconomicPolicy")
        if self.mtp not in MTP:
            raise InputError(f"policy: mtp is {self.mtp!r}, expected one of {', '.join(MTP)}")
        steps = self.max_steps
        if steps is not None and not (type(steps) is int and 1 <= steps <= MAX_POSITIONS):
            raise InputError(f"policy: max_steps is {steps!r}, expected 1 to {MAX_POSITIONS}")
        if self.drafting not in PATHS:
            raise InputError(f"policy: drafting is {self.drafting!r}, expected one of {', '.join(PATHS)}")
        if self.routing is not None and not isinstance(self.routing, RoutingPolicy):
            raise InputError("policy: routing must be a RoutingPolicy, or None")
        model = self.model
        if model is not None and not (isinstance(model, Mapping) and {"name", "sha256"} <= model.keys()):
            raise InputError("policy: model must have a name and a sha256, or be null for any model")
        if not isinstance(self.measured_on, Mapping):
            raise InputError("policy: measured_on must be an object")

    def options(self) -> dict[str, Any]:
        """The arguments of stream_generate() and generate(). Routing is not among them: see set_routing()."""
        return {
            "mtp": {"on": True, "off": False}.get(self.mtp, "auto"),
            "retention": self.retention,
            "max_steps": self.max_steps,
            "drafting": self.drafting,
        }

    @property
    def by_the_clock(self) -> bool:
        """Whether what is drafted depends on measured time, so that a seed does not repeat a sampled text."""
        return self.mtp == "auto" or (self.mtp == "on" and isinstance(self.retention, EconomicPolicy))

    def check_model(self, model: nn.Module) -> list[str]:
        """Raise InputError where it is for another model. Returns what else is not as it was measured, in words."""
        from .replay.costs import measured_on
        from .replay.recording import fingerprint

        found = fingerprint(model, head=False)
        if self.model is not None and dict(self.model) != found:
            raise InputError(
                f"the policy is for another model ({self.model['name']}, {self.model['sha256'][:12]}), not for this "
                f"one ({found['name']}, {found['sha256'][:12]}): run 'strata_mlx tune' with this model"
            )
        here = measured_on(model)
        return [
            f"{name} {self.measured_on[name]}, here {here[name]}"
            for name in ("machine", "device", "dtype", "versions")
            if name in self.measured_on and self.measured_on[name] != here[name]
        ]

    def to_json(self) -> str:
        """As one JSON object."""
        routing = None if self.routing is None else json.loads(self.routing.to_json())
        value = {
            "format": FORMAT,
            "version": VERSION,
            "mtp": self.mtp,
            "max_steps": self.max_steps,
            "drafting": self.drafting,
            "retention": json.loads(self.retention.to_json()),
            "routing": routing,
            "model": None if self.model is None else dict(self.model),
            "measured_on": dict(self.measured_on),
        }
        return json.dumps(value, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Policy:
        """What to_json() wrote, or a person did: mtp and retention are needed, the rest has defaults.

        Raises:
            InputError: not a JSON object, another format or version, an unknown or repeated key, or a value that the
                policy refuses.
        """
        values = json_object("policy", text)
        if values.pop("format", None) != FORMAT:
            raise InputError(f'policy: not a policy of strata_mlx, which says "format": "{FORMAT}"')
        if (found := values.pop("version", None)) != VERSION:
            raise InputError(
                f"policy: has version {found!r}, this program reads {VERSION}: run 'strata_mlx tune' again"
            )
        values = dict(known("policy", values, cls, _REQUIRED))
        values["retention"] = _retention(values["retention"])
        if values.get("routing") is not None:
            values["routing"] = RoutingPolicy.from_json(json.dumps(values["routing"]))
        return cls(**values)

    def save(self, path: Path) -> None:
        """Write the file; it appears complete or stays as it was. Raises Fault where that fails."""
        write_text(path, self.to_json() + "\n", "the policy")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Policy:
        """Read a file. Raises InputError, which names it, for one that is broken or of another version."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from error
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: policy: not text in UTF-8") from error
        except InputError as error:
            raise InputError(f"{path}: {error}") from None

    def __str__(self) -> str:
        if self.mtp == "off":
            return "plain decoding"
        drafts = "" if self.max_steps is None else f", up to {self.max_steps} drafts"
        how = f"{self.retention}, {self.drafting}" if isinstance(self.retention, EconomicPolicy) else ""
        return how or f"{self.retention}{drafts}, {self.drafting}"


def write_text(path: Path, text: str, what: str) -> None:
    """Write ``text``; the file appears complete or stays as it was. Raises Fault, saying ``what``, where that fails."""
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise Fault(f"{path}: {what} cannot be written: {error.strerror or error}") from error


def _retention(value: Any) -> RetentionPolicy | EconomicPolicy:
    if not isinstance(value, dict):
        raise InputError(f"policy: retention must be an object, found {type(value).__name__}")
    text = json.dumps(value)
    return EconomicPolicy.from_json(text) if value.get("kind") == KIND else RetentionPolicy.from_json(text)
