"""Checkpoints on disk: headers and byte ranges, how parameters are made of tensors, conversion."""

from .checkpoint import MTP_FILE, Checkpoint, TensorReader, read_json
from .recipe import Recipe
from .safetensors import TensorEntry, read_header

__all__ = ["MTP_FILE", "Checkpoint", "Recipe", "TensorEntry", "TensorReader", "read_header", "read_json"]
