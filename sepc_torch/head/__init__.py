"""Embeddings to calibrated trust: projection, evidence, calibration and conformal guarantees."""

from sepc_torch.head.trust_head import TrustHead

__all__ = ["TrustHead"]
