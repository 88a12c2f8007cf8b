"""Experts on disk: where their bytes lie, and reading them into memory that the caller hands out."""

from .disk import DiskSettings
from .ranges import Field
from .reads import Reads
from .store import ExpertStore

__all__ = ["DiskSettings", "ExpertStore", "Field", "Reads"]
