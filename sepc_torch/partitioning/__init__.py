"""Labelled points to a :class:`~sepc_torch.Partition`: Algorithms 1 and 2 of the paper, and the landscape of classes."""
