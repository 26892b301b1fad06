"""Lightning (extra ``lightning``): flag low-trust samples while training, refit, and close the active-learning loop."""

from sepc_torch.training.lightning.lightning_names import MisconfigurationException
from sepc_torch.training.lightning.monitor import TrustMonitor
from sepc_torch.training.lightning.pool_data import PoolDataModule

__all__ = ["MisconfigurationException", "PoolDataModule", "TrustMonitor"]
