"""Write a checkpoint with random weights in the shapes of a real model, to measure reading and streaming with.

    python benchmarks/make_synthetic.py --shape qwen3-next-80b --layers 4 --output FOLDER [--bits 4] [--json]

Data are made and written in pieces of a few megabytes, so that memory stays small. Weights are scaled so that
activations stay finite; the text that comes out is noise. The tokenizer, and the vocabulary, are the embedded model's.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from numpy.typing import NDArray
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import report
from strata_mlx.checkpoint.checkpoint import INDEX, read_json
from strata_mlx.checkpoint.precision import ROUTER, Precision, PrecisionPlan
from strata_mlx.checkpoint.safetensors import write_header
from strata_mlx.hub import EMBEDDED
from strata_mlx.models import qwen3_next
from strata_mlx.models.plan import group_of

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-next-80b": {
        "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "rms_norm_eps": 1e-6, "rope_theta": 10000000, "partial_rotary_factor": 0.25,
        "max_position_embeddings": 262144, "tie_word_embeddings": False,
    },
}  # fmt: skip
_PIECE = 1 << 20  # elements that are made at a time
_DTYPES = {mx.uint32: "U32", mx.float32: "F32", mx.bfloat16: "BF16"}


def make_synthetic(
    shape: str, layers: int, output: Path, bits: int = 4, dtype: mx.Dtype = mx.bfloat16, progress: bool = False
) -> dict[str, Any]:
    """Write the checkpoint into the new folder ``output``; ``dtype`` is that of scales, norms and the like."""
    output.mkdir(parents=True)
    embedded = read_json(EMBEDDED / "config.json")
    config = {**SHAPES[shape], "num_hidden_layers": layers}
    config |= {key: embedded[key] for key in ("vocab_size", "eos_token_id")}
    precision = PrecisionPlan(Precision.make(bits), {"router": ROUTER})
    model = qwen3_next.FAMILY.build(config, 0)
    config["quantization"] = _quantise(model, precision)
    files: dict[str, list[tuple[str, mx.array]]] = {}
    for name, array in tree_flatten(model.parameters()):
        files.setdefault(f"model-{group_of(name)}.safetensors", []).append((name, array))
    modules, total = dict(model.named_modules()), 0
    for file, tensors in tqdm(files.items(), unit="file", desc="Writing", disable=not progress):
        with open(output / file, "wb") as out:
            kept = [(name, mx.uint32 if array.dtype == mx.uint32 else dtype, array.shape) for name, array in tensors]
            write_header(out, [(name, _DTYPES[kind], size) for name, kind, size in kept])
            for name, kind, size in kept:
                total += _write(out, _values(name, size, modules[name.rpartition(".")[0]]), kind)
            out.flush()
            os.fsync(out.fileno())
    weight_map = {name: file for file, tensors in files.items() for name, _ in tensors}
    (output / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    (output / "config.json").write_text(json.dumps(config, indent=1))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(EMBEDDED / name, output / name)
    return {"path": str(output), "shape": shape, "layers": layers, "bits": bits, "bytes": total}


def _quantise(model: nn.Module, precision: PrecisionPlan) -> dict[str, Any]:
    """Quantise the skeleton, and return the ``quantization`` object of config.json."""
    assert precision.default
    config = precision.default.config()

    def choose(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized"):
            return False
        chosen = precision.of(path, module.weight.shape[-1])
        assert chosen
        if chosen != precision.default:
            config[path] = chosen.config()
        return chosen.config()

    nn.quantize(model, class_predicate=choose)
    return config


def _values(name: str, shape: tuple[int, ...], module: nn.Module) -> Iterator[NDArray[Any]]:
    """A parameter's values in pieces, as uint32 or float32. Weights have a deviation of 1 / sqrt(inputs)."""
    path, _, kind = name.rpartition(".")
    # Scales and biases of one module are made of the same numbers.
    rng = np.random.default_rng(zlib.crc32(f"{path}.{'scales' if kind == 'biases' else kind}".encode()))
    for count in _pieces(math.prod(shape)):
        if kind in ("scales", "biases"):
            levels, inputs = 2**module.bits, shape[-1] * module.group_size
            scale = rng.uniform(0.5, 1.5, count).astype(np.float32) * math.sqrt(12 / inputs) / levels
            yield scale if kind == "scales" else scale * (1 - levels) / 2
        elif "scales" in module:
            yield rng.integers(0, 2**32, count, np.uint32)
        elif kind == "A_log":
            yield np.log(rng.uniform(1, 16, count)).astype(np.float32)
        elif len(shape) == 1:
            yield np.ones(count, np.float32)
        else:
            yield rng.standard_normal(count, np.float32) * math.prod(shape[1:]) ** -0.5


def _pieces(size: int) -> Iterator[int]:
    for start in range(0, size, _PIECE):
        yield min(_PIECE, size - start)


def _write(out: BinaryIO, pieces: Iterator[NDArray[Any]], dtype: mx.Dtype) -> int:
    written = 0
    for piece in pieces:
        if dtype == mx.bfloat16:
            piece = (piece.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        written += out.write(piece.data)
    return written


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-next-80b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--output", type=Path, required=True, help="folder to write, which must not exist")
    parser.add_argument("--bits", type=int, default=4, choices=(2, 3, 4, 5, 6, 8))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of scales and the like")
    args = parser.parse_args()
    dtype = {"bfloat16": mx.bfloat16, "float32": mx.float32}[args.dtype]
    result = make_synthetic(args.shape, args.layers, args.output, args.bits, dtype, progress=not args.json)
    if not report.publish(result, args):
        print(f"{result['path']}: {result['bytes'] / 1e9:.3f} GB")


if __name__ == "__main__":
    main()
