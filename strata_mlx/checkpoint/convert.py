"""Convert a checkpoint to the MLX layout, or to the packed one, one layer at a time.

The result appears under its name only when it is complete. Until then it is built in ``NAME.partial``, where finished
files survive an interruption: the same conversion, started again, goes on after them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from tqdm import tqdm

from .._version import __version__
from ..errors import CheckpointError, Fault, InputError, in_one_line
from .checkpoint import INDEX, MTP_FILE, TensorReader, read_json
from .pack import moe_of, padding, write_packed
from .precision import Precision, PrecisionPlan
from .safetensors import FLOATING, read_header

if TYPE_CHECKING:
    from ..models.plan import ModelPlan

MANIFEST = "conversion.json"
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
_DEQUANTISED_AT_ONCE = 2**18  # weights: MLX's CPU backend needs many times their bytes meanwhile
_DTYPE_NAMES = {mx.float32: "float32", mx.bfloat16: "bfloat16", mx.float16: "float16"}


@dataclass(frozen=True)
class Conversion:
    """What to do: ``precision`` None leaves quantised weights as they are; ``dtype`` None leaves floating ones so.

    pack: write the packed layout (pack.py), which streams with one read per expert.
    """

    plan: ModelPlan
    precision: PrecisionPlan | None = None
    dequantise: bool = False
    dtype: mx.Dtype | None = None
    pack: bool = False
    modules: dict[str, nn.Module] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "modules", dict(self.plan.model.named_modules()))
        quantised = any(is_quantised(module) for module in self.modules.values())
        if self.precision and self.dequantise:
            raise InputError("choose quantising or dequantising, not both")
        if self.precision and quantised:
            raise InputError(f"{self.plan.checkpoint.path} is quantised already; dequantise it first (-d)")
        if self.dequantise and not quantised:
            raise InputError(f"{self.plan.checkpoint.path} is not quantised, so there is nothing to dequantise")
        if self.pack and self.plan.args.num_experts == 1:
            raise InputError(f"{self.plan.checkpoint.path} has one expert per layer, so there is nothing to pack")
        if self.precision:  # find a wrong part or a group size that does not divide before anything is written
            self.precision.check_parts(path for path in self.modules if hasattr(self.modules[path], "to_quantized"))
            for path in self.modules:
                self.precision_of(path)

    def precision_of(self, path: str) -> Precision | None:
        """The precision that the module at ``path`` is given; None if it is not to be quantised."""
        module = self.modules[path]
        if self.precision is None or not hasattr(module, "to_quantized"):
            return None
        return self.precision.of(path, module.weight.shape[-1])

    def files(self) -> dict[str, list[str]]:
        """The parameters by the file that they go to."""
        groups = self.plan.groups()
        parts = [name for name in groups if name != "mtp"]
        names = {part: f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i, part in enumerate(parts)}
        return {names.get(part, MTP_FILE): parameters for part, parameters in groups.items()}

    def nbytes(self, parameters: list[str]) -> int:
        """Bytes of what ``parameters`` become."""
        return sum(map(self._nbytes, parameters)) + (self._padding(parameters) if self.pack else 0)

    def _padding(self, parameters: list[str]) -> int:
        number, layers = self.plan.args.num_experts, Counter[str]()
        for parameter in parameters:
            if moe := moe_of(parameter):
                layers[moe] += self._nbytes(parameter)
        return sum(number * padding(nbytes // number) for nbytes in layers.values())

    def _nbytes(self, parameter: str) -> int:
        path, _, kind = parameter.rpartition(".")
        module, entry = self.modules[path], self.plan.checkpoint.tensors[self.plan.recipes[parameter].sources[0]]
        dtype = self._dtype_of(parameter)
        itemsize = dtype.size if dtype and entry.dtype in FLOATING else entry.nbytes // entry.size
        size = self.plan.source_bytes(parameter) * entry.size // entry.nbytes
        if self.dequantise and is_quantised(module):
            return size * 32 // module.bits * self._dequantised_dtype.size if kind == "weight" else 0
        precision = self.precision_of(path) if kind == "weight" else None
        return precision.nbytes(size, itemsize) if precision else size * itemsize

    def tensors(self, parameters: list[str], read: TensorReader) -> Iterator[dict[str, mx.array]]:
        """What each of ``parameters`` becomes, computed, with as little else in memory at a time as possible."""
        for parameter in parameters:
            path, _, kind = parameter.rpartition(".")
            module = self.modules[path]
            precision = self.precision_of(path) if kind == "weight" else None
            if self.dequantise and is_quantised(module):
                # Scales and biases go into the weight.
                made = {parameter: self._dequantised(path, module, read)} if kind == "weight" else {}
            elif precision:
                weight = self._build(parameter, read)
                mx.eval(weight)
                quantised = mx.quantize(weight, precision.group_size, precision.bits, mode=precision.mode)
                made = dict(zip((parameter, f"{path}.scales", f"{path}.biases"), quantised, strict=False))
                mx.eval(made)
                del weight, quantised
            else:
                made = {parameter: self._build(parameter, read)}
            mx.eval(made)
            mx.clear_cache()
            yield made

    def _build(self, parameter: str, read: TensorReader) -> mx.array:
        recipe = self.plan.recipes[parameter]
        array = recipe.build(read, self._dtype_of(parameter))
        if recipe.half != 0 and (
            recipe.rows is None or recipe.rows[0]
        ):  # what comes after it shares the first one's data
            read.release(recipe.sources)
        return array

    def _dtype_of(self, parameter: str) -> mx.Dtype | None:
        """``dtype``, except where the model asks for the type that the checkpoint has."""
        may_cast = getattr(self.plan.model, "cast_predicate", lambda _: True)
        return self.dtype if may_cast(parameter) else None

    @property
    def _dequantised_dtype(self) -> mx.Dtype:
        return self.dtype or mx.bfloat16

    def _dequantised(self, path: str, module: nn.Module, read: TensorReader) -> mx.array:
        kinds = [kind for kind in ("weight", "scales", "biases") if f"{path}.{kind}" in self.plan.recipes]
        weight, scales, *biases = (self._build(f"{path}.{kind}", read) for kind in kinds)
        options = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
        rows = max(1, _DEQUANTISED_AT_ONCE * len(weight) * module.bits // (32 * weight.size))
        pieces = []
        for start in range(0, len(weight), rows):
            w, s, *b = (array[start : start + rows] for array in (weight, scales, *biases))
            pieces.append(mx.dequantize(w, s, b[0] if b else None, **options).astype(self._dequantised_dtype))
            mx.eval(pieces)
        return mx.concatenate(pieces)

    def config(self) -> dict[str, Any]:
        """The config.json of the result."""
        config = read_json(self.plan.checkpoint.path / "config.json")
        config.pop("vision_config", None)
        if self.dtype:
            config["torch_dtype"] = _DTYPE_NAMES[self.dtype]
        if self.dequantise:
            config.pop("quantization", None)
            config.pop("quantization_config", None)
        if self.precision:
            default = self.precision.default or Precision.make()
            chosen = {
                path: self.precision_of(path) for path in self.modules if hasattr(self.modules[path], "to_quantized")
            }
            config["quantization"] = default.config() | {
                path: precision.config() if precision else False
                for path, precision in chosen.items()
                if precision != default
            }
            config["quantization_config"] = config["quantization"]
        return dict(sorted(config.items()))

    def manifest(self) -> dict[str, Any]:
        """What decides the result; finished files of an interrupted conversion are kept only if theirs was the same."""
        files = sorted({entry.file for entry in self.plan.checkpoint.tensors.values()})
        stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        options = {"dtype": str(self.dtype), "dequantise": self.dequantise, "pack": self.pack}
        return {"version": __version__, "source": stats, "config": self.config(), **options}

    def largest_layer(self) -> int:
        """Bytes of the largest layer, before or after, whichever is more: convert() stays under twice that."""
        groups = self.plan.groups().values()
        return max(max(sum(map(self.plan.source_bytes, names)), self.nbytes(names)) for names in groups)


def is_quantised(module: nn.Module) -> bool:
    return "scales" in module


def convert(conversion: Conversion, target: Path, progress: bool = True) -> Path:
    """Carry out ``conversion`` into the new folder ``target`` and return it.

    Peak memory is under twice the largest layer. Raises InputError if ``target`` exists and Fault when the disk fails
    or is full; finished files stay in ``target.partial`` for the next try.
    """
    staging = target.with_name(target.name + ".partial")
    for path in (target, staging):
        if os.path.lexists(path) and not (path == staging and _is_ours(path)):
            raise InputError(f"{path} exists already; remove it or choose another --mlx-path")
    files = conversion.files()
    try:
        _prepare(staging, conversion.manifest())
        _check_space(staging, sum(map(conversion.nbytes, files.values())))
        read, weight_map = conversion.plan.checkpoint.reader(), {}
        with tqdm(total=len(conversion.plan.recipes), unit="tensor", desc="Converting", disable=not progress) as bar:
            for name, parameters in files.items():
                if _is_finished(staging / name):
                    bar.update(len(parameters))
                else:
                    _write_shard(staging / name, conversion.tensors(parameters, read), conversion.pack, bar.update)
                weight_map.update(dict.fromkeys(read_header(staging / name), name))
        _write_rest(conversion, staging, {name: file for name, file in weight_map.items() if file != MTP_FILE})
        os.replace(staging, target)
        (target / MANIFEST).unlink()
    except OSError as error:
        raise Fault(f"{error.filename or staging}: {error.strerror}; {_resume_advice(staging)}") from error
    except RuntimeError as error:
        raise Fault(f"{staging}: {in_one_line(error)} ({_free(staging)} free); {_resume_advice(staging)}") from error
    return target


def _is_ours(staging: Path) -> bool:
    """Whether an interrupted conversion made this folder."""
    return (staging / MANIFEST).is_file() or (staging.is_dir() and not any(staging.iterdir()))


def _prepare(staging: Path, manifest: dict[str, Any]) -> None:
    """Make the staging folder, empty unless it holds part of this very conversion."""
    data, file = json.dumps(manifest, indent=1, sort_keys=True).encode(), staging / MANIFEST
    if file.exists() and file.read_bytes() != data:
        shutil.rmtree(staging)
    staging.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)


def _check_space(staging: Path, needed: int) -> None:
    done = sum(file.stat().st_size for file in staging.glob("*.safetensors"))
    free = shutil.disk_usage(staging).free
    if needed - done > free:
        raise Fault(
            f"{staging}: the model needs {(needed - done) / 1e9:.3f} GB, but {free / 1e9:.3f} GB are free on that disk"
        )


def _is_finished(file: Path) -> bool:
    try:
        return bool(read_header(file))
    except CheckpointError:  # missing, or cut short when the machine went down
        return False


def _write_shard(path: Path, tensors: Iterator[dict[str, mx.array]], pack: bool, advance: Callable[[], Any]) -> None:
    arrays = {}
    for made in tensors:
        arrays.update(made)
        advance()
    unfinished = path.with_name(f"unfinished-{path.name}")
    if pack:
        with open(unfinished, "wb") as file:
            write_packed(file, arrays)
    else:
        mx.save_safetensors(str(unfinished), arrays, metadata={"format": "mlx"})
    read_header(unfinished)  # a short write is found now, not at the next load
    os.replace(unfinished, path)


def _write_rest(conversion: Conversion, staging: Path, weight_map: dict[str, str]) -> None:
    for file in staging.glob("unfinished-*"):
        file.unlink()
    source = conversion.plan.checkpoint.path
    for pattern in _COPIED:
        for file in source.glob(pattern):
            if file.name not in ("config.json", INDEX, MANIFEST):
                shutil.copyfile(file, staging / file.name)
    total = sum(entry.nbytes for name in set(weight_map.values()) for entry in read_header(staging / name).values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (staging / INDEX).write_text(json.dumps(index, indent=1))
    (staging / "config.json").write_text(json.dumps(conversion.config(), indent=4))


def _free(staging: Path) -> str:
    return f"{shutil.disk_usage(staging).free / 1e9:.3f} GB"


def _resume_advice(staging: Path) -> str:
    return f"run the same command again to go on, or remove {staging}"
