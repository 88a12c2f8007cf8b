"""From a memory budget to slots: everything that a run needs is counted, and what is left holds experts.

Where the process' memory is the budget's (CPU, Apple silicon), what the interpreter and its libraries have is measured;
on a GPU with memory of its own the budget is about that. The rest is reckoned from the checkpoint's headers, before any
weight is read. Sizes are in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from ..checkpoint.safetensors import FLOATING
from ..device import compute_dtype, on_cpu
from ..errors import InputError
from ..models.family import EXPERT_PARAMETER
from ..models.moe import blocks
from ..models.plan import ModelPlan, group_of
from ..speculation.draft import MAX_STEPS
from . import system
from .sizes import format_size, parse_size

CONTEXT = 4096  # tokens that caches are reckoned for, where nobody says
KV_STEP = 256  # tokens that an attention cache grows by
LEAST_CHUNK = 16  # rows of a prompt that are read at a time, at the least; a verify window has fewer
_RESIDENT_CHUNK = 64  # and where all experts are in memory: with fewer, streaming some reads a prompt faster
_SHARE = 4  # one part in so many of what is left may go to activations, so that experts are read for more rows at once
_RESERVE = 10  # `auto` leaves one part in so many of the system's memory to others
# Measured on the CPU (benchmarks/memory_budget.py): code and stacks that a process first touches when it decodes, how
# much two processes differ by, and what MLX's nodes of a graph take for each row of a layer that recurs row by row.
_FIRST_USE = 6_000_000
_JITTER = 3_000_000
_NODES = 12_000
_BUFFERS = 1_000_000  # that MLX keeps for reuse: on the CPU more makes nothing faster
# On Metal nothing has been measured yet: compiled kernels and command buffers are assumed to take this much.
_FIRST_USE_METAL = 96_000_000
_BUFFERS_GPU = 64_000_000


@dataclass(frozen=True)
class Activations:
    """What MLX holds at most while a chunk of a prompt goes through the layers.

    Reckoned from what the layers were measured to hold with MLX's op path: the arrays of one layer at a time, for each
    row and, in attention, for each row and token of context.
    """

    per_row: int
    per_row_and_token: int
    context: int

    def of(self, rows: int) -> int:
        return rows * (self.per_row + self.per_row_and_token * (self.context + rows))


@dataclass(frozen=True)
class Needs:
    """What a run of a model needs.

    scope: whose memory. fixed: by part, whatever the slots. loading: beside weights and slots, while they are read.
    loading_resident: the same where all experts are read at once. activations: of a chunk; resident_nodes: what a row
    takes besides, where no layer is waited for. window: of decoding, beside the caches. per_slot: a slot in every MoE
    layer. experts: in a layer. least: slots that one token needs. step_size: rows of a chunk that are asked for.
    """

    scope: str
    fixed: dict[str, int]
    loading: int
    loading_resident: int
    activations: Activations
    resident_nodes: int
    window: int
    per_slot: int
    layers: int
    experts: int
    least: int
    step_size: int

    @property
    def smallest(self) -> int:
        """The smallest budget that works."""
        streaming = sum(self.fixed.values()) + self._work(LEAST_CHUNK) + self.least * self.per_slot
        return streaming if self.least < self.experts else self.resident

    @property
    def resident(self) -> int:
        """The smallest budget in which all experts are in memory, and nothing streams."""
        work = max(self._work(min(_RESIDENT_CHUNK, self._rows), self.resident_nodes), self.loading_resident)
        return sum(self.fixed.values()) + work + self.experts * self.per_slot

    def fit(self, budget: int) -> Fit:
        """How ``budget`` is spent. More never gives fewer slots.

        Raises InputError that names the smallest budget that works.
        """
        if budget < self.smallest:
            raise InputError(
                f"a budget of {format_size(budget)} of {self.scope} is too small for this model: the smallest that "
                f"works is {format_size(self.smallest + self._jitter, up=True)} ({self._spent()}); a shorter context "
                f"needs less"
            )
        left = budget - sum(self.fixed.values())
        if budget >= self.resident:
            work = min(left - self.experts * self.per_slot, self._most(self.resident_nodes))
            return self._fit(budget, self.experts, work, streams=False)
        least = self._work(LEAST_CHUNK)
        work = max(least, min((left - self.least * self.per_slot) // _SHARE, self._most()))
        slots = min((left - work) // self.per_slot, self.experts - 1)
        if slots == self.experts - 1:
            work = min(left - slots * self.per_slot, self._most())
        return self._fit(budget, slots, work, streams=True)

    @property
    def _jitter(self) -> int:
        return _JITTER if self.fixed.get("process") else 0

    @property
    def _rows(self) -> int:
        """The most rows that a chunk can have."""
        return min(self.step_size, self.activations.context)

    def _work(self, rows: int, nodes: int = 0) -> int:
        """Of reading ``rows`` of a prompt, of decoding or of loading, which never happen at the same time."""
        return max(self.activations.of(rows) + rows * nodes, self.window, self.loading)

    def _most(self, nodes: int = 0) -> int:
        """Of all that may be asked for."""
        return self._work(self._rows, nodes)

    def _chunk(self, work: int, nodes: int) -> int:
        """The most rows, a power of two unless it is what was asked for, that go through the layers in ``work``."""
        if self._most(nodes) <= work:
            return self.step_size
        rows = 1
        while 2 * rows <= self._rows and self._work(2 * rows, nodes) <= work:
            rows *= 2
        return rows

    def _spent(self) -> str:
        parts = {
            **self.fixed,
            "work": self._work(LEAST_CHUNK),
            f"{self.least} slots a layer": self.least * self.per_slot,
        }
        return ", ".join(f"{name.replace('_', ' ')} {format_size(size)}" for name, size in parts.items() if size)

    def _fit(self, budget: int, slots: int, work: int, streams: bool) -> Fit:
        chunk = self._chunk(work, 0 if streams else self.resident_nodes)
        parts = {**self.fixed, "work": work, "experts": slots * self.per_slot}
        return Fit(budget, self.scope, streams, slots, self.experts, self.layers, self.per_slot, chunk, parts)


@dataclass(frozen=True)
class Fit:
    """How a budget is spent.

    scope: whose memory. streams: False where all experts are in memory. slots: of each of ``layers`` MoE layers with
    ``experts`` each; a slot in all of them takes ``per_slot``. chunk: rows of a prompt that are read at a time.
    parts: bytes by what they are for, at most ``budget`` together.
    """

    budget: int
    scope: str
    streams: bool
    slots: int
    experts: int
    layers: int
    per_slot: int
    chunk: int
    parts: dict[str, int]

    def __str__(self) -> str:
        held = f"{self.slots / self.experts:.0%} of {self.experts} x {self.layers} experts in memory"
        if not self.streams:
            held = f"all {self.experts} x {self.layers} experts in memory, nothing streams"
        return f"{format_size(self.budget)} of {self.scope}: {held}; prompts are read {self.chunk} tokens at a time"

    def to_dict(self) -> dict[str, Any]:
        return {
            "budget": self.budget,
            "scope": self.scope,
            "streams": self.streams,
            "slots": self.slots,
            "experts": self.experts,
            "moe_layers": self.layers,
            "prefill_step_size": self.chunk,
            "bytes": self.parts,
        }


def budget_bytes(memory: int | str) -> int:
    """What ``memory`` asks for: bytes, an amount such as "12GB", or "auto".

    "auto" is what the system can give now, on top of what the process has, less a tenth of the machine's memory; on
    Apple silicon not more than Metal recommends to use. Limits of control groups (containers) count. On a GPU with
    memory of its own it is what that has left, and what MLX has of it, less a tenth of all.
    """
    if isinstance(memory, int):
        return parse_size(str(memory))
    if memory.strip().lower() != "auto":
        return parse_size(memory)
    if system.on_gpu_of_its_own():
        gpu = mx.device_info(mx.gpu)
        return _gpu_memory() + int(gpu["free_memory"]) - int(gpu["total_memory"]) // _RESERVE
    most = system.footprint() + system.available() - system.total() // _RESERVE
    if mx.metal.is_available():
        most = min(most, int(mx.device_info(mx.gpu)["max_recommended_working_set_size"]))
    if most <= 0:
        raise InputError("memory auto: the system has no memory to give; close programs, or name an amount")
    return most


def needs(
    plan: ModelPlan, dtype: str = "auto", *, context: int = CONTEXT, step_size: int = 2048, adapters: int = 0
) -> Needs:
    """What ``plan`` needs to be run in ``dtype`` (as in load()) with up to ``context`` tokens.

    step_size: rows of a prompt that are read at a time, if there is room. adapters: bytes of theirs.
    Measures the memory of this process: everything that is imported must have been, and the tokenizer loaded.
    """
    sizes, args = list(_parameter_sizes(plan, dtype)), plan.args
    itemsize = (compute_dtype(dtype) or mx.bfloat16).size
    experts = [size for size in sizes if EXPERT_PARAMETER.fullmatch(size.name)]
    dense = [size for size in sizes if not EXPERT_PARAMETER.fullmatch(size.name)]
    head = sum(size.loaded for size in dense if size.name.startswith("mtp."))
    recurrent, attention = _layers(plan)
    state = _state_bytes(args, itemsize) if recurrent else 0
    own_gpu = system.on_gpu_of_its_own()
    return Needs(
        scope="GPU memory" if own_gpu else "process memory",
        fixed={
            "process": _process(own_gpu),
            "weights": sum(size.loaded for size in dense) - head,
            "mtp_head": head,
            "kv_cache": (attention + 1)
            * _kv_bytes(args, context, itemsize),  # one grows while its old arrays are there
            "recurrent_state": 2 * recurrent * state,  # the next one is made from the one before
            "adapters": adapters,
            "buffers": _BUFFERS if on_cpu() else _BUFFERS_GPU,
        },
        loading=_by_group(dense),
        loading_resident=_by_group(sizes),
        activations=_activations(plan, context, itemsize, recurrent),
        resident_nodes=recurrent * _NODES,
        window=_window_bytes(args, recurrent, state, itemsize),
        per_slot=_slot_bytes(experts, args.num_experts, own_gpu),
        layers=len(blocks(plan.model)),
        experts=args.num_experts,
        least=args.num_experts_per_tok,
        step_size=step_size,
    )


def _slot_bytes(sizes: list[_Size], experts: int, own_gpu: bool) -> int:
    """Of a slot in every layer; where experts are copied to a GPU, a layer at a time, with room for the copies."""
    layers: dict[str, int] = {}
    for size in sizes:
        layer = size.name.partition(".switch_mlp.")[0]
        layers[layer] = layers.get(layer, 0) + size.loaded // experts
    return sum(layers.values()) + (max(layers.values()) if own_gpu else 0)


def _by_group(sizes: list[_Size]) -> int:
    """What the largest part that is loaded at a time takes for a while."""
    groups: dict[str, int] = {}
    for size in sizes:
        groups[group_of(size.name)] = groups.get(group_of(size.name), 0) + size.temporary
    return max(groups.values(), default=0)


def _process(own_gpu: bool) -> int:
    if own_gpu:
        return _gpu_memory()
    return system.footprint() + (_FIRST_USE if on_cpu() else _FIRST_USE_METAL)


def _gpu_memory() -> int:
    """What MLX has of it."""
    return mx.get_active_memory() + mx.get_cache_memory()


@dataclass(frozen=True)
class _Size:
    """loaded: bytes in memory. temporary: bytes beside that while it is made."""

    name: str
    loaded: int
    temporary: int


def _parameter_sizes(plan: ModelPlan, dtype: str) -> Iterator[_Size]:
    cast, modules = compute_dtype(dtype), dict(plan.model.named_modules())
    for name, recipe in plan.recipes.items():
        entry, stored = plan.checkpoint.tensors[recipe.sources[0]], plan.source_bytes(name)
        is_cast = cast is not None and entry.dtype in FLOATING
        loaded = stored * entry.size // entry.nbytes * cast.size if cast is not None and is_cast else stored
        arranged = on_cpu() and isinstance(modules[name.rpartition(".")[0]], nn.Linear) and name.endswith(".weight")
        made = len(recipe.sources) > 1 or recipe.half is not None or recipe.swap or recipe.shift
        source = plan.checkpoint.tensors[recipe.sources[0]].nbytes if recipe.half is not None else stored
        yield _Size(name, loaded, source * (is_cast or made or arranged) + loaded * (is_cast and (made or arranged)))


def _layers(plan: ModelPlan) -> tuple[int, int]:
    """Recurrent layers, and layers with attention, those of the MTP head among them."""
    model = plan.model
    caches = model.make_cache() if hasattr(model, "make_cache") else [None] * len(model.layers)
    recurrent = sum(isinstance(cache, ArraysCache) for cache in caches)
    head = len(model.mtp.layers) if "mtp" in model else 0
    return recurrent, len(caches) - recurrent + head


def _kv_bytes(args: Any, context: int, itemsize: int) -> int:
    """Of one layer: a cache that is not aligned to its steps has up to one step more."""
    tokens = (math.ceil(context / KV_STEP) + 1) * KV_STEP
    return 2 * args.num_key_value_heads * args.head_dim * itemsize * tokens


def _state_bytes(args: Any, itemsize: int) -> int:
    """Of one recurrent layer: the convolution's tail, and the state in float32."""
    return (args.linear_conv_kernel_dim - 1) * _convolved(args) * itemsize + 4 * _recurrence(args)


def _convolved(args: Any) -> int:
    keys = args.linear_num_key_heads * args.linear_key_head_dim
    return 2 * keys + args.linear_num_value_heads * args.linear_value_head_dim


def _recurrence(args: Any) -> int:
    return args.linear_num_value_heads * args.linear_value_head_dim * args.linear_key_head_dim


def _window_bytes(args: Any, recurrent: int, state: int, itemsize: int) -> int:
    """A verify window's log, the states before and after it, and the logits of its rows with what is made of them."""
    rows = 1 + MAX_STEPS
    log = (
        recurrent * (2 * state + (rows + args.linear_conv_kernel_dim) * 2 * _convolved(args) * itemsize)
        if recurrent
        else 0
    )
    return log + 6 * rows * args.vocab_size * 4


def _activations(plan: ModelPlan, context: int, itemsize: int, recurrent: int) -> Activations:
    args, hidden = plan.args, plan.args.hidden_size
    heads = args.num_attention_heads * args.head_dim
    moe = args.num_experts_per_tok * (4 * hidden + 3 * args.moe_intermediate_size) + 4 * hidden
    moe += 3 * (getattr(args, "shared_expert_intermediate_size", 0) or 0) + 4 * args.num_experts
    layers = [moe * itemsize, (11 * heads + 4 * hidden) * itemsize]
    if recurrent:
        wide = 2 * _convolved(args) * itemsize
        # The op path keeps the state after each row until the chunk is done; Metal has a kernel that does not.
        states = 0 if mx.metal.is_available() else 4 * _recurrence(args) + _NODES
        layers.append(5 * wide + states)
    scores = 0 if mx.metal.is_available() else 2 * args.num_attention_heads * itemsize
    return Activations(max(layers) + 6 * hidden * itemsize, scores, context)
