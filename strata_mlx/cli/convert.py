"""Convert a checkpoint to the MLX layout, one layer at a time, and quantise it.

    strata_mlx convert --model Qwen/Qwen3-Next-80B-A3B-Instruct --mlx-path qwen3-next-4bit -q
    strata_mlx convert --model FOLDER --mlx-path OUT -q --q-bits 4 --q-part experts.down_proj=5:32 --q-part lm_head=8

mlx_lm can load the result; the MTP head goes to mtp.safetensors, which mlx_lm leaves alone. An interrupted conversion
goes on when it is started again. With --pack, each expert's tensors lie together at the start of a page, so that
streaming needs one read per expert; such a folder is for strata_mlx alone.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ..errors import InputError
from . import started
from .options import NotHere, add_model, number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--hf-path", dest="model", default=argparse.SUPPRESS, help="the same as --model, as in mlx_lm")
    parser.add_argument(
        "--mlx-path", type=Path, default=Path("mlx_model"), help="folder to write, which must not exist"
    )
    parser.add_argument("-q", "--quantize", action="store_true", help="quantise the weights")
    parser.add_argument("--q-bits", type=number(int, 2, 8), help="bits per weight (default: 4, and 8 for the router)")
    parser.add_argument("--q-group-size", type=number(int, 16, 128), help="weights that share a scale (default: 64)")
    parser.add_argument(
        "--q-mode",
        default="affine",
        choices=("affine", "mxfp4", "nvfp4", "mxfp8"),
        help="kind of quantisation",
    )
    parser.add_argument(
        "--q-part",
        action="append",
        default=[],
        metavar="PART=BITS[:GROUP_SIZE]",
        help="another precision for one part, or PART=none to keep it; can be given several times. Parts: embedding, "
        "attention, "
        "linear_attention, router, experts, shared_expert, lm_head, a projection (experts.down_proj), any of them in "
        "the MTP "
        "head (mtp.experts)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float16", "bfloat16", "float32"),
        help="type of unquantised weights (default: as they are)",
    )
    parser.add_argument(
        "-d", "--dequantize", action="store_true", help="turn a quantised checkpoint into an unquantised one"
    )
    parser.add_argument(
        "--pack", action="store_true", help="store each expert as one record, to be streamed with one read"
    )
    parser.add_argument("--dry-run", action="store_true", help="show what would be written, and write nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object, and no progress bar")
    for option, reason in {
        "--trust-remote-code": "code from a model's folder is never run",
        "--upload-repo": "upload the folder with 'hf upload'",
        "--quant-predicate": "choose the precision of each part with --q-part",
    }.items():
        parser.add_argument(option, action=NotHere, reason=reason)


def run(args: argparse.Namespace) -> int:
    if not args.quantize and (args.q_bits or args.q_group_size or args.q_part or args.q_mode != "affine"):
        raise InputError("--q-bits, --q-group-size, --q-mode and --q-part need -q")

    import mlx.core as mx

    from ..checkpoint import Checkpoint
    from ..checkpoint.convert import Conversion, convert
    from ..device import DTYPES
    from ..hub import find_model
    from ..models.plan import plan_model

    plan = plan_model(Checkpoint.open(find_model(args.model, revision=args.revision)))
    conversion = Conversion(plan, _precision(args), args.dequantize, DTYPES.get(args.dtype), args.pack)
    files = {name: conversion.nbytes(parameters) for name, parameters in conversion.files().items()}
    report: dict[str, Any] = {"path": str(args.mlx_path), "files": files, "bytes": sum(files.values())}
    started()
    if not args.dry_run:
        mx.reset_peak_memory()
        convert(conversion, args.mlx_path, progress=not args.json)
        report["peak_memory_gb"] = mx.get_peak_memory() / 1e9
    if args.json:
        print(json.dumps({**report, "dry_run": args.dry_run}))
    else:
        _print(report, args.dry_run)
    return 0


def _precision(args: argparse.Namespace) -> Any:
    from ..checkpoint.precision import ROUTER, Precision, PrecisionPlan, parse_part

    if not args.quantize:
        return None
    parts = dict(parse_part(text, args.q_mode, args.q_group_size) for text in args.q_part)
    return PrecisionPlan(Precision.make(args.q_bits, args.q_group_size, args.q_mode), {"router": ROUTER, **parts})


def _print(report: dict[str, Any], dry_run: bool) -> None:
    if dry_run:
        for name, size in report["files"].items():
            print(f"{size / 1e6:12.3f} MB  {name}")
    print(f"{report['path']}: {report['bytes'] / 1e9:.3f} GB {'would be ' if dry_run else ''}written", end="")
    print("" if dry_run else f", peak memory {report['peak_memory_gb']:.3f} GB")
