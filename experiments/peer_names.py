"""Titles of the trust panel's peers in tables, as ``compare`` prints them."""

from __future__ import annotations

from sepc_torch.metrics.compare import TITLES

PEERS = TITLES | {
    "trust_score_1": f"{TITLES['trust_score']}, first neighbour",
    "knn_50": f"{TITLES['knn']}, 50 neighbours",
}
