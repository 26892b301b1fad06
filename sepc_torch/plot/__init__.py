"""Matplotlib pictures of partitions, decisions, embeddings and metrics, each on axes (extra ``plot``)."""

from sepc_torch.plot.curves import draw_drift, draw_reliability, draw_risk_coverage, draw_set_sizes
from sepc_torch.plot.embeddings import draw_class_table, draw_embedding
from sepc_torch.plot.palette import COLORS, MARKERS
from sepc_torch.plot.partitions import draw_decisions, draw_partition, outline

__all__ = [
    "COLORS",
    "MARKERS",
    "draw_class_table",
    "draw_decisions",
    "draw_drift",
    "draw_embedding",
    "draw_partition",
    "draw_reliability",
    "draw_risk_coverage",
    "draw_set_sizes",
    "outline",
]
