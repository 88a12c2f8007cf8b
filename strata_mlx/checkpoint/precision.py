"""Which part of a model gets how many bits."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import InputError

# Module names inside a model, and the part that each belongs to.
_PARTS = {
    "embed_tokens": "embedding",
    "lm_head": "lm_head",
    "self_attn": "attention",
    "linear_attn": "linear_attention",
    "switch_mlp": "experts",
    "shared_expert": "shared_expert",
    "shared_expert_gate": "router",
    "shared_experts": "shared_expert",
    "gate": "router",
    "mlp": "mlp",
    "fc": "fc",
    "eh_proj": "fc",
    "shared_head": "lm_head",
}
PARTS = tuple(dict.fromkeys(_PARTS.values()))  # norms are never quantised
DEFAULTS = {"affine": (64, 4), "mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}  # mode: group size, bits
AFFINE_BITS = (2, 3, 4, 5, 6, 8)
AFFINE_GROUP_SIZES = (32, 64, 128)


def part_of(path: str) -> str:
    """The part that a module or parameter belongs to, such as ``experts.down_proj``; ``mtp.`` precedes those of the
    head.
    """
    words = path.split(".")
    index = max((i for i, word in enumerate(words) if word in _PARTS), default=None)
    prefix = "mtp." if words[0] == "mtp" else ""
    if index is None or any("norm" in word for word in words):
        return f"{prefix}norms"
    part = _PARTS[words[index]]
    projection = words[index + 1] if len(words) > index + 1 and words[index + 1].endswith("_proj") else ""
    return f"{prefix}{part}{'.' if projection else ''}{projection}"


@dataclass(frozen=True)
class Precision:
    """How weights are stored: ``bits`` per weight in groups of ``group_size`` inputs that share a scale."""

    bits: int
    group_size: int
    mode: str = "affine"

    def __post_init__(self) -> None:
        if self.mode not in DEFAULTS:
            raise InputError(f"quantisation mode {self.mode!r} is unknown; choose {', '.join(DEFAULTS)}")
        if self.mode != "affine" and (self.group_size, self.bits) != DEFAULTS[self.mode]:
            group_size, bits = DEFAULTS[self.mode]
            raise InputError(
                f"mode {self.mode} has {bits} bits in groups of {group_size}, not {self.bits} in {self.group_size}"
            )
        if self.mode == "affine" and (self.bits not in AFFINE_BITS or self.group_size not in AFFINE_GROUP_SIZES):
            raise InputError(
                f"{self.bits} bits in groups of {self.group_size} is not a precision that MLX has; "
                f"bits: {AFFINE_BITS}, group sizes: {AFFINE_GROUP_SIZES}"
            )

    @classmethod
    def make(cls, bits: int | None = None, group_size: int | None = None, mode: str = "affine") -> Precision:
        """A precision with the mode's defaults for what is not given."""
        default_group, default_bits = DEFAULTS.get(mode, (0, 0))
        return cls(default_bits if bits is None else bits, default_group if group_size is None else group_size, mode)

    def config(self) -> dict[str, Any]:
        """As in the ``quantization`` object of config.json."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}

    def nbytes(self, size: int, scale_bytes: int) -> int:
        """Bytes of ``size`` weights; ``scale_bytes`` is the size of one floating scale."""
        per_group = 2 * scale_bytes if self.mode == "affine" else 1
        return size * self.bits // 8 + size // self.group_size * per_group


@dataclass(frozen=True)
class PrecisionPlan:
    """The precision of every module: ``parts`` by part name, most specific first, ``default`` for the rest.

    None keeps the floating weights.
    """

    default: Precision | None
    parts: Mapping[str, Precision | None] = field(default_factory=dict)

    def of(self, path: str, inputs: int) -> Precision | None:
        """The precision of the module at ``path``, whose rows have ``inputs`` weights.

        Raises InputError if its group size does not divide them.
        """
        part = part_of(path)
        precision = self.default
        for name in _from_specific_to_general(part):
            if name in self.parts:
                precision = self.parts[name]
                break
        if precision and inputs % precision.group_size:
            part = part.removeprefix("mtp.")  # what the trunk is given, the head takes over
            raise InputError(
                f"groups of {precision.group_size} do not divide the {inputs} inputs of {path}; choose a smaller "
                f"--q-group-size "
                f"or, for this part only, --q-part {part}=BITS:GROUP_SIZE ({part}=none keeps it unquantised)"
            )
        return precision

    def check_parts(self, paths: Iterable[str]) -> None:
        """Raise InputError for a part that none of the modules at ``paths`` belongs to, such as a misspelt one. Routers
        that are never quantised do with ROUTER, which is the default for them.
        """
        known = {name for path in paths for name in _from_specific_to_general(part_of(path))}
        for part, precision in self.parts.items():
            if part not in known and (part, precision) != ("router", ROUTER):
                raise InputError(
                    f"--q-part {part}: this model has no such part to quantise; it has {', '.join(sorted(known))}"
                )


def _from_specific_to_general(part: str) -> list[str]:
    """``mtp.experts.down_proj`` gives itself, ``mtp.experts``, ``mtp``, ``experts.down_proj`` and ``experts``."""
    words = part.split(".")
    names = [".".join(words[:n]) for n in range(len(words), 0, -1)]
    return names + _from_specific_to_general(part.removeprefix("mtp.")) if words[0] == "mtp" else names


# The router decides which experts run, and costs next to nothing: mlx_lm stores it in 8 bits too.
ROUTER = Precision(8, 64)
_SPEC = re.compile(r"(?P<part>[a-z_.]+)=(?:(?P<none>none)|(?P<bits>[0-9]{1,3})(?::(?P<group>[0-9]{1,3}))?)")


def parse_part(text: str, mode: str = "affine", group_size: int | None = None) -> tuple[str, Precision | None]:
    """Read ``PART=BITS``, ``PART=BITS:GROUP_SIZE`` or ``PART=none``; raises InputError for anything else."""
    match = _SPEC.fullmatch(text)
    part = match["part"] if match else ""
    if not match or part.removeprefix("mtp.").split(".")[0] not in (*PARTS, "mtp"):
        raise InputError(
            f"--q-part {text!r:.80}: expected PART=BITS, PART=BITS:GROUP_SIZE or PART=none, where PART is one of "
            f"{', '.join(PARTS)}, "
            "one of their projections (experts.down_proj), or either in the MTP head (mtp.experts)"
        )
    if match["none"]:
        return part, None
    return part, Precision.make(int(match["bits"]), int(match["group"]) if match["group"] else group_size, mode)
