"""What the peers of the trust panel are called in tables: as ``compare`` calls them."""

from __future__ import annotations

from sepc_torch.metrics.compare import TITLES

PEERS = TITLES | {
    "trust_score_1": f"{TITLES['trust_score']}, first neighbour",
    "knn_50": f"{TITLES['knn']}, 50 neighbours",
}
