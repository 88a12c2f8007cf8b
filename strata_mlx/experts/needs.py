"""What a run of a model needs, reckoned from the checkpoint's headers before any weight is read.

Where the process' memory is the budget's (CPU, Apple silicon), what the interpreter and its libraries have is measured;
on a GPU with memory of its own the budget is about that. Sizes are in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..checkpoint.safetensors import FLOATING
from ..device import arranges, compute_dtype, on_cpu
from ..models.dequantised import growths
from ..models.family import EXPERT_PARAMETER
from ..models.moe import blocks
from ..models.plan import KeysAndValues, ModelPlan, group_of
from ..speculation.draft import MAX_STEPS
from . import system
from .budget import CONTEXT, Activations, Needs, gpu_memory
from .staged import staging_bytes

KV_STEP = 256  # tokens that an attention cache grows by
# Measured on the CPU (benchmarks/memory_budget.py): code and stacks that a process first touches when it decodes, and
# what MLX's nodes of a graph take for each row of a layer that recurs row by row.
_FIRST_USE = 6_000_000
_NODES = 12_000
_LOGITS = 6  # arrays of the size of a window's logits that are made of them
_TASKS = 10  # operations, here on recurrent states, that MLX's CPU backend begins ahead of their end
_BUFFERS = 1_000_000  # that MLX keeps for reuse: on the CPU more makes nothing faster
# On Metal nothing has been measured yet: compiled kernels and command buffers are assumed to take this much.
_FIRST_USE_METAL = 96_000_000
_BUFFERS_GPU = 64_000_000


def needs_of(
    plan: ModelPlan,
    dtype: str = "auto",
    *,
    context: int = CONTEXT,
    step_size: int = 2048,
    adapters: int = 0,
    sequences: int = 1,
    prefixes: int = 0,
) -> Needs:
    """What ``plan`` needs to be run in ``dtype`` (as in load()) with up to ``context`` tokens.

    step_size: rows of a prompt that are read at a time, if there is room. adapters: bytes of theirs. sequences: that
    are decoded together, each with up to ``context`` tokens. prefixes: bytes for states that are kept for later.
    Measures the memory of this process: everything that is imported must have been, and the tokenizer loaded.
    """
    sizes, args = list(_parameter_sizes(plan, dtype)), plan.args
    cast = compute_dtype(dtype)
    itemsize = (cast or mx.bfloat16).size
    experts = [size for size in sizes if EXPERT_PARAMETER.fullmatch(size.name)]
    dense = [size for size in sizes if not EXPERT_PARAMETER.fullmatch(size.name)]
    head = sum(size.loaded for size in dense if size.name.startswith("mtp."))
    # A fused head has a copy of its input projection.
    copied = 0 if on_cpu() else sum(size.loaded for size in dense if size.name.startswith("mtp.fc."))
    attention = plan.attention()
    recurrent = len(plan.model.layers) - len(attention)
    state = _state_bytes(args, itemsize) if recurrent else 0
    kv = [_kv_bytes(cache, context, itemsize) for cache in (*attention, *plan.attention(head=True))]
    activations = _activations(plan, context, itemsize, recurrent)
    together = activations.of(sequences) + _LOGITS * sequences * args.vocab_size * 4 if sequences > 1 else 0
    own_gpu = system.on_gpu_of_its_own()
    process = _process(own_gpu)  # before anything computes, which _FIRST_USE is for
    slots = _slot_bytes(experts, args.num_experts)
    # Other types than float32 are multiplied as they are.
    grown = growths(plan.model) if cast is not None and cast == mx.float32 else ([], [])
    return Needs(
        scope="GPU memory" if own_gpu else "process memory",
        fixed={
            "process": process,
            "weights": sum(size.loaded for size in dense) - head,
            "mtp_head": head + copied,
            "kv_cache": sequences * (sum(kv) + max(kv)),  # one grows while its old arrays are there
            "recurrent_state": sequences * 2 * recurrent * state,  # the next one is made from the one before
            # One more is made before the one that it takes the place of goes.
            "prefixes": prefixes + sum(kv) + recurrent * state if prefixes else 0,
            "adapters": adapters,
            "buffers": _BUFFERS if on_cpu() else _BUFFERS_GPU,
            "staging": staging_bytes(max(slots)) if own_gpu else 0,
        },
        loading=_by_group(dense),
        loading_resident=_by_group(sizes),
        activations=activations,
        resident_nodes=recurrent * _NODES,
        window=max(_window_bytes(args, recurrent, state, itemsize), together),
        per_slot=sum(slots),
        layers=len(blocks(plan.model)),
        experts=args.num_experts,
        least=args.num_experts_per_tok,
        step_size=step_size,
        sequences=sequences,
        float32=tuple(grown[0]),
        float32_experts=tuple(grown[1]),
    )


def _slot_bytes(sizes: list[_Size], experts: int) -> list[int]:
    """Of a slot in each layer."""
    layers: dict[str, int] = {}
    for size in sizes:
        layer = size.name.partition(".switch_mlp.")[0]
        layers[layer] = layers.get(layer, 0) + size.loaded // experts
    return list(layers.values())


def _by_group(sizes: list[_Size]) -> int:
    """What the largest part that is loaded at a time takes for a while."""
    groups: dict[str, int] = {}
    for size in sizes:
        groups[group_of(size.name)] = groups.get(group_of(size.name), 0) + size.temporary
    return max(groups.values(), default=0)


def _process(own_gpu: bool) -> int:
    if own_gpu:
        return gpu_memory()
    return system.footprint() + (_FIRST_USE if on_cpu() else _FIRST_USE_METAL)


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
        arranged = arranges(modules[name.rpartition(".")[0]]) and name.endswith(".weight")
        part = recipe.half is not None or recipe.rows is not None
        made = len(recipe.sources) > 1 or part or recipe.swap or recipe.shift
        source = plan.checkpoint.tensors[recipe.sources[0]].nbytes if part else stored
        yield _Size(name, loaded, source * (is_cast or made or arranged) + loaded * (is_cast and (made or arranged)))


def _kv_bytes(cache: KeysAndValues, context: int, itemsize: int) -> int:
    """A cache that is not aligned to its steps has up to one step more; a verify window holds a sliding one twice."""
    tokens = (math.ceil(context / KV_STEP) + 1) * KV_STEP
    return cache.size(tokens) * itemsize * (1 if cache.window is None else 2)


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
    log = 0
    if recurrent:
        log = recurrent * (2 * state + (rows + args.linear_conv_kernel_dim) * 2 * _convolved(args) * itemsize)
    return log + _LOGITS * rows * args.vocab_size * 4


def _activations(plan: ModelPlan, context: int, itemsize: int, recurrent: int) -> Activations:
    args, hidden = plan.args, plan.args.hidden_size
    heads = args.num_attention_heads * args.head_dim
    on_metal = mx.metal.is_available() and not on_cpu()
    moe = args.num_experts_per_tok * (4 * hidden + 3 * args.moe_intermediate_size) + 4 * hidden
    shared = getattr(args, "shared_expert_intermediate_size", 0) or 0
    shared += (getattr(args, "n_shared_experts", 0) or 0) * args.moe_intermediate_size
    moe += 3 * shared + 4 * args.num_experts
    dense = 3 * getattr(args, "intermediate_size", 0) + 4 * hidden
    layers = [moe * itemsize, (11 * heads + 4 * hidden) * itemsize, dense * itemsize]
    # A sliding window keeps all rows of a chunk until the next one comes.
    slid = sum(cache.elements for cache in plan.attention() if cache.window) * itemsize
    in_flight, added = 0, 0
    if hasattr(args, "kv_lora_rank"):  # keys and values of all heads for all tokens, and scores of the rotated keys
        in_flight = args.num_attention_heads * (args.qk_nope_head_dim + args.v_head_dim) * itemsize * context
        added = 2 * args.num_attention_heads * itemsize
    if recurrent:
        wide = 2 * _convolved(args) * itemsize
        # The op path keeps the state after each row until the chunk is done; Metal has a kernel that does not.
        states = 0 if on_metal else 4 * _recurrence(args) + _NODES
        layers.append(5 * wide + states)
        in_flight = 0 if on_metal else _TASKS * 4 * _recurrence(args)
    scores = 0 if on_metal else 2 * args.num_attention_heads * itemsize
    return Activations(max(layers) + 6 * hidden * itemsize + slid, scores + added, context, in_flight)
