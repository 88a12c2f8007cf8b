"""How a caller wants experts to be kept in memory, and what that comes to for a model."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import InputError
from ..models.moe import blocks
from ..models.plan import ModelPlan
from ..routing.residency import Residency
from .budget import CONTEXT, Fit, Needs, budget_bytes
from .disk import DiskSettings
from .eviction import DEFAULT_EVICTION
from .needs import needs_of
from .pressure import Guard, beyond, system_sources
from .profile import ExpertProfile
from .streaming import Streaming, streaming_of

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from ..parallel.experts import Share
    from ..parallel.ranks import Ranks

PLACEMENTS = ("even", "profile")
Context = int | Callable[["TokenizerWrapper"], int]


@dataclass(frozen=True)
class ExpertOptions:
    """The options of load() that are about experts, with their meaning there."""

    slots: int | Sequence[int] | None = None
    memory: int | str | None = None
    context: Context = CONTEXT
    prefill_step_size: int = 2048
    eviction: str = DEFAULT_EVICTION
    profile: Path | None = None
    pinned: Path | None = None
    io_threads: int | None = None
    sequences: int = 1
    prefixes: int = 0
    ranks: Ranks | None = None
    placement: str = "even"

    def __post_init__(self) -> None:
        if self.slots is not None and self.memory is not None:
            raise InputError("slots and memory both say how many experts are in memory; give one of them")
        if self.placement not in PLACEMENTS:
            raise InputError(f"placement is {self.placement!r}, expected one of {', '.join(PLACEMENTS)}")
        if self.placement == "profile" and self.profile is None:
            raise InputError("placement by a profile: give the expert_profile too")
        if self.ranks is None and self.placement != "even":
            raise InputError("placement is for expert parallelism: give the ranks too")
        if self.slots is None and self.memory is None and self.ranks is None:
            for name, value in (
                ("expert_profile", self.profile),
                ("pinned", self.pinned),
                ("io_threads", self.io_threads),
            ):
                if value is not None:
                    raise InputError(f"{name} is for experts that are read from disk: give a memory budget as well")

    @property
    def settings(self) -> DiskSettings | None:
        return None if self.io_threads is None else DiskSettings(threads=self.io_threads)

    def share(self, plan: ModelPlan, profile: ExpertProfile | None) -> Share | None:
        """The experts that this rank has, as rank 0 says; None where there are no ranks."""
        if self.ranks is None or self.ranks.size == 1:
            return None
        from ..parallel.experts import Share
        from ..parallel.placement import Placement, balanced, even

        experts = plan.args.num_experts
        placement = even(experts, self.ranks.size)
        if self.placement == "profile" and profile:
            counts = {index: layer.counts for index, layer in profile.layers.items()}
            placement = balanced(counts, experts, self.ranks.size)
        return Share(self.ranks, Placement.from_dict(self.ranks.broadcast(placement.to_dict())))

    def needs(self, plan: ModelPlan, dtype: str, tokenizer: TokenizerWrapper, adapters: int = 0) -> Needs:
        """What ``plan`` needs in ``dtype``, measured with everything in memory that generating imports."""
        importlib.import_module("strata_mlx.engine")
        tokenizer.decode(tokenizer.encode("text"))
        context = self.context if isinstance(self.context, int) else self.context(tokenizer)
        return needs_of(
            plan,
            dtype,
            context=context,
            step_size=self.prefill_step_size,
            adapters=adapters,
            sequences=self.sequences,
            prefixes=self.prefixes,
        )

    def fit(
        self,
        plan: ModelPlan,
        dtype: str,
        tokenizer: TokenizerWrapper,
        adapters: int = 0,
        share: Share | None = None,
    ) -> Fit | None:
        """How the budget is spent on ``plan`` in ``dtype``; None without one. adapters: bytes of theirs. share: the
        experts that are computed here, if not all.

        From now on MLX keeps little memory for reuse, in the whole process. Raises InputError for a budget that is too
        small.
        """
        if self.memory is None:
            return None
        needs = self.needs(plan, dtype, tokenizer, adapters)
        if share:
            needs = needs.of_share(share.most(needs.experts))
        fit = needs.fit(budget_bytes(self.memory))
        if share:  # a prompt goes through all ranks alike
            fit = replace(fit, chunk=min(share.ranks.exchange(fit.chunk)))
        mx.set_cache_limit(fit.parts["buffers"])
        return fit

    def pins(self, plan: ModelPlan) -> dict[int, list[int]]:
        """The experts that are pinned, by the index of their MoE layer."""
        if self.pinned is None:
            return {}
        layers = 1 + max(block.layer for block in blocks(plan.model))
        found = Residency.from_json(self.pinned, layers, plan.args.num_experts, "--pin")
        return {index: resident.nonzero()[0].tolist() for index, resident in found.layers.items()}

    def open_profile(self, plan: ModelPlan) -> ExpertProfile | None:
        """The file, which other ranks than 0 need not have."""
        if self.profile is None or (self.ranks and not self.ranks.leads and not self.profile.exists()):
            return None
        return ExpertProfile.open(self.profile, plan)


def begin(
    model: nn.Module,
    fit: Fit | None,
    pins: dict[int, list[int]],
    profile: ExpertProfile | None,
    share: Share | None = None,
) -> None:
    """Fill the slots of a ``model`` that was loaded as ``fit`` says, and have it watch over its memory. share: the
    experts that are computed here, if not all.
    """
    streaming: Streaming | None = streaming_of(model)
    model.fit, model.guard, model.expert_profile, model.ranks = fit, None, None, None
    if streaming is None:
        return
    streaming.warm(pins)
    if profile:
        profile.warm(streaming)
        if share is None or share.ranks.leads:
            model.expert_profile = profile
    if share:
        model.ranks, model.wire = share.ranks, share.wire
        for index, table in streaming.tables.items():
            mine = share.mine(index).nonzero()[0].tolist()
            if len(mine) <= table.slots:  # what never has to go is read at once
                streaming.warm({index: mine})
    if fit:
        model.guard = Guard(streaming, [beyond(fit.budget, fit.scope), *system_sources()])


def fit_of(model: nn.Module) -> Fit | None:
    """How the memory budget of ``model`` is spent; None where it was loaded without one."""
    return getattr(model, "fit", None)


def save_profile(model: nn.Module) -> None:
    """Write the expert profile of ``model``, if it was loaded with one and streams."""
    profile: Any = getattr(model, "expert_profile", None)
    streaming = streaming_of(model)
    if profile and streaming:
        profile.save(streaming)
