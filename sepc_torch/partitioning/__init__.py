"""Fitting a :class:`~sepc_torch.Partition` to labelled points (Algorithms 1 and 2), and the overlap of the classes."""
