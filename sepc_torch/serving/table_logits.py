"""The logits of a frozen classifier of a table in torch, for exported graphs: all rows go through all trees at once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from sepc_torch.data.table_classifier import ENERGY, LEAD, Linear, TableClassifier, Trees
from sepc_torch.data.table_encoding import TableEncoding
from sepc_torch.shapes import Array, Float, Int


class TableLogits(nn.Module):
    """The logits of a frozen classifier, computed as :meth:`TableClassifier.logits` does, in float64.

    Sums over trees have the order of the classifier, so that logits of boosting are equal to the last bit. Logarithms
    and products of matrices round in their own way.

    Args:
        classifier: Trees or a linear classifier.
        encoding: The encoding of the table.

    >>> from sepc_torch.data.table_encoding import NumberColumn
    >>> encoding = TableEncoding((NumberColumn("a", 0.0, 0.0, 1.0, False),), ())
    >>> linear = Linear(np.array([[2.0]]), np.array([1.0]))
    >>> TableLogits(linear, encoding)(torch.tensor([[3.0], [torch.nan]]))
    tensor([[-3.5000,  3.5000],
            [    nan,     nan]], dtype=torch.float64)
    """

    def __init__(self, classifier: TableClassifier, encoding: TableEncoding) -> None:
        super().__init__()
        self.kind = classifier.kind
        if isinstance(classifier, Trees):
            native = classifier.kind == "boosting"
            self.columns = _Columns(encoding) if native else nn.Identity()
            self.scores: nn.Module = _Scores(classifier)
        elif isinstance(classifier, Linear):
            self.columns = nn.Identity()
            self.scores = _LinearScores(classifier)
        else:
            raise ValueError(
                "The classifier of this model is an estimator of your own, of which there is no graph. Export the head "
                "alone, with logits=True or --logits: its graph takes the encoded rows and the logits, both of which "
                "TrustHead.with_logits(table) gives."
            )

    def forward(self, features: Float[Tensor, "B F"]) -> Float[Tensor, "B C"]:
        """Logits in float64; NaN for rows with NaN."""
        x = features.float()  # the precision that the classifier was fitted in, whatever it is given
        scores = self.scores(self.columns(x))
        if scores.shape[1] == 1:
            scores = torch.cat([-scores / 2.0, scores / 2.0], dim=1)
        logits = scores.log() - ENERGY if self.kind == "forest" else scores
        return torch.where(x.isnan().any(dim=1, keepdim=True), torch.nan, _leading(logits, scores.argmax(dim=1)))


def _leading(logits: Float[Tensor, "B C"], label: Int[Tensor, "B"]) -> Float[Tensor, "B C"]:
    """:func:`sepc_torch.data.table_classifier.leading` for tensors."""
    of_label = label.unsqueeze(1) == torch.arange(logits.shape[1], dtype=label.dtype, device=label.device)
    best = torch.where(of_label, -torch.inf, logits).amax(dim=1, keepdim=True)
    best = best.clamp_min(-torch.finfo(torch.float32).max)
    return torch.where(of_label, torch.maximum(logits, best + (best.abs() + 1.0) * LEAD), logits)


class _Columns(nn.Module):
    """:meth:`TableEncoding.columns_of` for tensors: numbers of categories and numbers, NaN where missing."""

    gap: Tensor

    def __init__(self, encoding: TableEncoding) -> None:
        super().__init__()
        self.numbers, self.widths = len(encoding.numbers), encoding.widths
        gaps = np.array([column.gaps for column in encoding.numbers], dtype=bool)
        # The feature that says whether a number is missing; the last one, which is always 0, for numbers without gaps.
        place = np.where(gaps, self.numbers - 1 + np.cumsum(gaps), len(encoding.feature_names))
        self.start = self.numbers + int(gaps.sum())
        if self.numbers:  # torch.export.save writes no empty tensor of NumPy's
            self.register_buffer("gap", torch.from_numpy(place))

    def forward(self, x: Float[Tensor, "B F"]) -> Float[Tensor, "B _"]:
        """One value for each column."""
        columns = []
        start = self.start
        for width in self.widths:
            group = x[:, start : start + width]
            code = group.argmax(dim=1, keepdim=True).to(x.dtype)
            columns.append(torch.where(group.amax(dim=1, keepdim=True) > 0, code, torch.nan))
            start += width
        if self.numbers:
            missing = nn.functional.pad(x, (0, 1)).index_select(1, self.gap) > 0
            columns.append(torch.where(missing, torch.nan, x[:, : self.numbers]))
        return torch.cat(columns, dim=1)


class _LinearScores(nn.Module):
    """Log odds of a linear classifier."""

    coef: Tensor
    intercept: Tensor

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.register_buffer("coef", torch.from_numpy(linear.coef.astype(np.float64)))
        self.register_buffer("intercept", torch.from_numpy(linear.intercept.astype(np.float64)))

    def forward(self, x: Float[Tensor, "B F"]) -> Float[Tensor, "B K"]:
        """Log odds."""
        return x.double() @ self.coef.T + self.intercept


class _Scores(nn.Module):
    """Sums of log odds, or means of probabilities, of trees.

    A leaf is its own child, so that all rows take as many steps as the deepest tree needs.
    """

    root: Tensor
    column: Tensor
    threshold: Tensor
    child: Tensor
    leaf: Tensor
    missing_left: Tensor  # of boosting
    sorts: Tensor  # the last three where a split is about categories
    split: Tensor
    goes_left: Tensor
    value: Tensor
    start: Tensor

    def __init__(self, trees: Trees) -> None:
        super().__init__()
        self.kind = trees.kind
        inner, sorts = trees.column >= 0, trees.split >= 0
        place = np.arange(len(inner))
        # Left and right child of node n are entries 2 n and 2 n + 1.
        child = np.stack([np.where(inner, trees.left, place), np.where(inner, trees.right, place)], axis=1)
        self.steps, self.has_kinds = _depth(trees.root, child, inner), bool(sorts.any())
        arrays: dict[str, Array] = {
            "root": trees.root[trees.output.argsort(kind="stable")],  # trees of an output stand together, in order
            "column": np.where(inner, trees.column, 0),
            "child": child.ravel(),
            "leaf": np.where(inner, 0, trees.left),
        }
        if self.has_kinds:
            arrays["split"] = np.maximum(trees.split, 0) * trees.goes_left.shape[1]  # its first entry of goes_left
        arrays = {name: array.astype(np.int64) for name, array in arrays.items()}
        arrays["threshold"] = _below(np.where(sorts, -np.inf, trees.threshold))
        arrays |= {"value": trees.value.astype(np.float64), "start": trees.start.astype(np.float64)}
        flags = {"missing_left": trees.missing_left} if self.kind == "boosting" else {}
        flags |= {"sorts": sorts, "goes_left": trees.goes_left.ravel()} if self.has_kinds else {}
        arrays |= {name: flag.astype(bool) for name, flag in flags.items()}
        for name, array in arrays.items():
            self.register_buffer(name, torch.from_numpy(array))
        self.ends = np.bincount(trees.output, minlength=len(trees.start)).cumsum().tolist()

    def forward(self, x: Float[Tensor, "B _"]) -> Float[Tensor, "B K"]:
        """The scores, added tree by tree."""
        leaf = self._leaves(x)
        totals = []
        for k, (first, end) in enumerate(pairwise([0, *self.ends])):
            # All trees of a forest have a value for each score, a tree of a boosting has one for its score.
            mine, column = (leaf, k) if self.kind == "forest" else (leaf[:, first:end], 0)
            values = self.value[:, column].gather(0, mine.flatten()).reshape(-1, mine.shape[1])
            start = self.start[k].expand(values.shape[0], 1)
            # A running sum adds one tree after the other; the order of a plain sum is another one.
            totals.append(torch.cat([start, values], dim=1).cumsum(dim=1)[:, -1])
        total = torch.stack(totals, dim=1)
        return total / float(self.root.shape[0]) if self.kind == "forest" else total

    def _leaves(self, x: Float[Tensor, "B _"]) -> Int[Tensor, "B trees"]:
        """The leaf of each tree in which each row ends.

        Tables of nodes are read by ``gather``: torch's ONNX exporter makes operators of an index that are ten times
        slower.
        """
        trees = self.root.shape[0]
        node = self.root.expand(x.shape[0], -1).flatten()
        for _ in range(self.steps):
            value = x.gather(1, self.column.gather(0, node).reshape(-1, trees)).flatten()
            left = value <= self.threshold.gather(0, node)  # false for NaN, and for categories
            if self.kind == "boosting":  # a row of a forest has no gaps
                missing = value.isnan()
                left = left | (missing & self.missing_left.gather(0, node))
                if self.has_kinds:
                    sorts = self.sorts.gather(0, node) & ~missing
                    code = torch.where(sorts, value, 0.0).long()
                    left = left | (sorts & self.goes_left.gather(0, self.split.gather(0, node) + code))
            node = self.child.gather(0, 2 * node + (~left).long())
        return self.leaf.gather(0, node).reshape(-1, trees)


def _below(threshold: Float[Array, "n"]) -> Float[Array, "n"]:
    """The largest number in float32 that is at most a threshold: values in float32 pass both alike."""
    with np.errstate(over="ignore"):
        narrow = threshold.astype(np.float32)
    return np.where(narrow > threshold, np.nextafter(narrow, np.float32(-np.inf)), narrow)


def _depth(root: Int[Array, "trees"], child: Int[Array, "nodes 2"], inner: Array) -> int:
    """Number of steps from the roots to the deepest leaf."""
    steps, nodes = 0, root[inner[root]]
    while len(nodes):
        nodes = child[nodes].ravel()
        nodes = nodes[inner[nodes]]
        steps += 1
    return steps
