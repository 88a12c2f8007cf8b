"""Load a model and its tokenizer, ready to generate."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm import tokenizer_utils
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.tokenizer_utils import TokenizerWrapper

from . import cuda
from .checkpoint import Checkpoint
from .checkpoint.safetensors import read_header
from .device import arrange, compute_dtype, evaluate, on_cpu
from .errors import CheckpointError, InputError, in_one_line
from .experts.budget import CONTEXT
from .experts.disk import DiskSettings
from .experts.eviction import DEFAULT_EVICTION
from .experts.options import Context, ExpertOptions, begin
from .experts.streaming import slots_by_layer, stream_experts, streaming_of
from .fused.layer import fuse
from .hub import find_model
from .models.dequantised import dequantise
from .models.plan import ModelPlan, plan_model

if TYPE_CHECKING:
    from .parallel.experts import Share
    from .parallel.ranks import Ranks

_LARGE_MODEL = 1 << 30
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")


def load(
    path_or_hf_repo: str | os.PathLike[str] | None = None,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    adapter_path: str | os.PathLike[str] | None = None,
    mtp: bool | str = False,
    tokenizer_config: dict[str, Any] | None = None,
    slots: int | Sequence[int] | None = None,
    memory: int | str | None = None,
    context: Context = CONTEXT,
    prefill_step_size: int = 2048,
    eviction: str = DEFAULT_EVICTION,
    expert_profile: str | os.PathLike[str] | None = None,
    pinned: str | os.PathLike[str] | None = None,
    io_threads: int | None = None,
    sequences: int = 1,
    prefixes: int = 0,
    ranks: Ranks | None = None,
    placement: str = "even",
) -> tuple[nn.Module, TokenizerWrapper]:
    """Load a model and its tokenizer.

    path_or_hf_repo: a folder or a Hugging Face repository; None is the embedded model. revision: of the repository.
    dtype: what floating parameters are computed in; "auto" is float32 on the CPU and the checkpoint's own type
    elsewhere.
    adapter_path: a folder of trained LoRA adapters. mtp: load the MTP head too, as ``model.mtp``; "auto" where there
    is one. tokenizer_config: options for the tokenizer's constructor.
    slots: how many experts of a MoE layer are in memory at a time, for all layers or for each, an MTP head's last; the
    others are read from disk when they are needed. None is all of them. The output does not depend on it.
    memory: what everything may take together, as "12GB", in bytes, or "auto" for what the system can give: it decides
    how many slots there are. The model's ``fit`` says how it is spent. MLX's cache of free memory is limited, for the
    whole process. context: tokens that there is to be room for, or what tells how many, given the tokenizer.
    prefill_step_size: rows of a prompt that are wanted at a time; fewer where memory is short.
    eviction: which expert makes room for another: one of strata_mlx.experts.eviction.EVICTIONS.
    expert_profile: a file that says which experts earlier runs selected; they are read at once. The model's
    ``expert_profile`` saves what this run has added. pinned: a JSON file of experts that are read at once and
    stay, ``{"0": [3, 17], ...}`` by the index of the layer. io_threads: that read experts.
    sequences: with memory, how many are decoded together, each with ``context`` tokens. prefixes: bytes for states that
    are kept for later.
    ranks: the processes that run this model together, from expert_parallel(); all of them load it with the same
    options. Each then has a share of every layer's experts, and slots, memory and pinned are about that. placement: how
    they are shared out: "even", or "profile", so that all have about as much to do by rank 0's expert_profile.

    Returns the model, a module that maps tokens ``[B, T]`` and a cache to logits ``[B, T, V]`` and that mlx_lm's
    functions take as well, and the tokenizer. Raises StrataError for whatever is wrong with name, files or memory.
    """
    options = ExpertOptions(
        slots,
        memory,
        context,
        prefill_step_size,
        eviction,
        Path(expert_profile) if expert_profile else None,
        Path(pinned) if pinned else None,
        io_threads,
        sequences,
        prefixes,
        ranks,
        placement,
    )
    checkpoint = Checkpoint.open(find_model(path_or_hf_repo, revision=revision))
    plan = plan_model(checkpoint, mtp=bool(mtp))
    if mtp is True and not plan.mtp_layers:
        raise CheckpointError(f"{checkpoint.path}: holds no MTP head (mtp.* tensors)")
    adapters = Path(adapter_path) if adapter_path else None
    pins, profile = options.pins(plan), options.open_profile(plan)
    share = options.share(plan, profile)
    if share:
        pins = share.pinned(pins)
    with ThreadPoolExecutor(max_workers=1) as pool:  # reading weights leaves the interpreter free
        tokenizer = pool.submit(load_tokenizer, checkpoint, tokenizer_config)
        if sum(map(plan.source_bytes, plan.recipes)) > _LARGE_MODEL:
            tokenizer.result()  # gigabytes are not read for nothing
        fit = None
        if memory is not None:
            fit = options.fit(plan, dtype, tokenizer.result(), _adapter_bytes(adapters) if adapters else 0, share)
            slots = fit.slots if fit and (fit.streams or share) else None
        model = load_model(plan, dtype, slots, eviction, options.settings, pins, share)
    model = apply_adapters(model, adapters) if adapters else model
    if not on_cpu():
        fuse(model)
    elif fit is None:
        dequantise(model)
    else:
        dequantise(model, fit.parts["float32"], fit.parts["work"])
    begin(model, fit, pins, profile, share)
    return model, tokenizer.result()


def load_model(
    plan: ModelPlan,
    dtype: str = "auto",
    slots: int | Sequence[int] | None = None,
    eviction: str = DEFAULT_EVICTION,
    settings: DiskSettings | None = None,
    pinned: Mapping[int, Collection[int]] | None = None,
    share: Share | None = None,
) -> nn.Module:
    """Read the parameters of ``plan`` into its model, part by part, and return it. The options are those of load(),
    pinned experts by the index of their layer. share: the experts that are computed here, if not all.

    Experts of layers that do not have a slot for each are never read here.
    """
    cuda.prepare()
    read, cast = plan.checkpoint.reader(), compute_dtype(dtype)
    modules = dict(plan.model.named_modules())
    if on_cpu() and cast != mx.float32 and any(isinstance(module, SwitchLinear) for module in modules.values()):
        raise InputError(
            f"dtype {dtype}: MLX's CPU backend multiplies unquantised experts in float32 only; use float32"
        )
    streaming = None
    if slots is not None or share:
        most = share.most(plan.args.num_experts) if share else None
        counts = slots_by_layer(plan, plan.args.num_experts if slots is None else slots, most)
        streaming = stream_experts(plan, cast, counts, eviction, settings, pinned, share)
    streamed = tuple(f"{path}." for path in streaming.paths) if streaming else ()
    for part, parameters in plan.groups().items():
        parameters = [name for name in parameters if not name.startswith(streamed)]
        weights = {
            name: arrange(modules[name.rpartition(".")[0]], plan.recipes[name].build(read, _cast(plan, name, cast)))
            for name in parameters
        }
        evaluate(weights, f"loading {part} of {plan.checkpoint.path}")
        plan.model.update(tree_unflatten(list(weights.items())))
        read.release(source for name in parameters for source in plan.recipes[name].sources)
    plan.model.eval()
    plan.model.streaming = streaming
    return plan.model


def _cast(plan: ModelPlan, parameter: str, cast: mx.Dtype | None) -> mx.Dtype | None:
    """What a floating parameter is cast to: not to fewer bits, where the model says that it needs all."""
    may_cast = getattr(plan.model, "cast_predicate", lambda _: True)
    return cast if cast is None or cast == mx.float32 or may_cast(parameter) else None


def _check_adapters(path: Path) -> None:
    for name in ("adapter_config.json", "adapters.safetensors"):
        if not (path / name).exists():
            raise InputError(f"{path / name}: missing; {path} does not hold trained adapters")


def _adapter_bytes(path: Path) -> int:
    """Of adapters in float32, at most."""
    _check_adapters(path)
    return sum(4 * entry.size for entry in read_header(path / "adapters.safetensors").values())


def apply_adapters(model: nn.Module, path: Path) -> nn.Module:
    """Add the LoRA adapters in the folder ``path`` to ``model``."""
    from mlx_lm.utils import load_adapters

    _check_adapters(path)
    if streaming := streaming_of(model):
        for name in read_header(path / "adapters.safetensors"):
            if name.startswith(tuple(f"{streamed}." for streamed in streaming.paths)):
                raise InputError(
                    f"{path / 'adapters.safetensors'}: {name!r} adapts experts, which is not possible while they are "
                    "read from disk: load the model without slots or a memory budget"
                )
    try:
        return load_adapters(model, str(path)).eval()
    except (ValueError, RuntimeError, AttributeError, KeyError, TypeError) as error:
        raise InputError(f"{path}: the adapters do not fit the model: {in_one_line(error)}") from error


def load_tokenizer(checkpoint: Checkpoint, config: dict[str, Any] | None = None) -> TokenizerWrapper:
    """The checkpoint's tokenizer, with the end-of-sequence tokens of its configuration. Never runs code from the
    folder.
    """
    path = checkpoint.path
    if not any((path / name).exists() for name in _TOKENIZER_FILES):
        raise CheckpointError(
            f"{path}: no tokenizer ({', '.join(_TOKENIZER_FILES)}); download or convert the model again"
        )
    options = {**(config or {}), "trust_remote_code": False}
    try:
        return tokenizer_utils.load(path, options, eos_token_ids=checkpoint.config.get("eos_token_id"))
    except Exception as error:  # the tokenizer libraries raise all kinds for a broken file
        raise CheckpointError(f"{path}: the tokenizer cannot be loaded: {in_one_line(error)}") from error
