"""Experts on disk under a memory budget."""

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .disk import DiskSettings
    from .ranges import Field
    from .reads import Reads
    from .store import ExpertStore

__all__ = ["DiskSettings", "ExpertStore", "Field", "Reads"]

# The models are built on some modules of this package, and others of them on the models.
__getattr__ = lazy(__name__, {"DiskSettings": "disk", "ExpertStore": "store", "Field": "ranges", "Reads": "reads"})
