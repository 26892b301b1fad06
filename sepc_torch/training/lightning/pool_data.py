"""Data module ``PoolDataModule``: trains on a pool's labelled samples, saves the pool's record in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from sepc_torch.training import LabelPool
from sepc_torch.training.lightning.lightning_names import DataModuleBase, MisconfigurationException


class PoolDataModule(DataModuleBase):
    """Loaders for a :class:`~sepc_torch.training.LabelPool` and for the sets to validate, test and predict on.

    With ``Trainer(reload_dataloaders_every_n_epochs=1)`` each epoch trains on all samples labelled before it starts. A
    checkpoint holds the pool's record. Loading a checkpoint merges its record into the pool and removes no label.

    Args:
        pool: The labelled and unlabelled samples.
        val: Validation data set or loader.
        test: Test data set or loader.
        predict: Data set or loader to predict on.
        loader: Arguments of every ``DataLoader``: ``batch_size``, ``num_workers``, ``collate_fn`` and so on.

    >>> samples = [([float(i)], i % 2) for i in range(6)]
    >>> data = PoolDataModule(LabelPool(samples, labelled=[0, 1]), val=samples, batch_size=4)
    >>> len(data.train_dataloader().dataset), len(data.pool_dataloader().dataset)
    (2, 4)
    """

    def __init__(self, pool: LabelPool, val: Any = None, test: Any = None, predict: Any = None, **loader: Any) -> None:
        super().__init__()
        if not isinstance(pool, LabelPool):
            raise MisconfigurationException(f"pool must be a LabelPool; got a {type(pool).__name__}.")
        for name in ("shuffle", "sampler", "batch_sampler"):
            if name in loader:
                raise MisconfigurationException(
                    f"{name} cannot be set: the training data are shuffled, and all others are read in order. Leave it "
                    "out."
                )
        self.pool = pool
        self.loader_options = loader
        # Methods are set only for existing data, because Lightning calls every loader method that it finds.
        for name, data in (("val", val), ("test", test), ("predict", predict)):
            if data is not None:
                setattr(self, f"{name}_dataloader", partial(self._loader, data))

    def train_dataloader(self) -> DataLoader[Any]:
        """Loader of the samples that are labelled now, shuffled."""
        if len(self.pool.labelled_ids) == 0:
            raise MisconfigurationException(
                "The pool has no labelled samples to train on. Label some samples first: LabelPool(..., labelled=ids), "
                "or pool.label(ids, y)."
            )
        return DataLoader(self.pool.labelled(), shuffle=True, **self.loader_options)

    def pool_dataloader(self) -> DataLoader[Any]:
        """Loader of the samples that are unlabelled now, in order."""
        return DataLoader(self.pool.pool(), **self.loader_options)

    def _loader(self, data: Any) -> DataLoader[Any]:
        return data if isinstance(data, DataLoader) else DataLoader(data, **self.loader_options)

    def state_dict(self) -> dict[str, Any]:
        """The pool's record."""
        return self.pool.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Merge the record of a checkpoint into the pool's."""
        self.pool.absorb(state_dict)
