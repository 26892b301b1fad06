"""Lightning (extra ``lightning``): flag low-trust samples while training, refit, and close the active-learning loop."""

from sepc_torch.callbacks.lightning_names import MisconfigurationException
from sepc_torch.callbacks.monitor import TrustMonitor
from sepc_torch.callbacks.pool_data import PoolDataModule

__all__ = ["MisconfigurationException", "PoolDataModule", "TrustMonitor"]
