"""The report of ``strata_mlx tune``: one HTML file that needs nothing else."""

from .page import page

__all__ = ["page"]
