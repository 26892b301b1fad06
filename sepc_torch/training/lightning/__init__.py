"""Lightning integration (extra ``lightning``): the callback ``TrustMonitor`` and the data module ``PoolDataModule``.

The callback fits and calibrates a trust head while a network trains, flags samples in every stage and scores a pool of
unlabelled samples. The data module trains on the labelled part of the pool.
"""

from sepc_torch.training.lightning.monitor import TrustMonitor
from sepc_torch.training.lightning.pooling import PoolDataModule
from sepc_torch.training.lightning.settings import MisconfigurationException

__all__ = ["MisconfigurationException", "PoolDataModule", "TrustMonitor"]
