"""Embeddings and logits of rows, from a fitted scikit-learn classifier (extra ``sklearn``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import sparse
from sklearn.calibration import CalibratedClassifierCV
from sklearn.decomposition import TruncatedSVD
from sklearn.frozen import FrozenEstimator
from sklearn.impute import SimpleImputer
from sklearn.model_selection import FixedThresholdClassifier, TunedThresholdClassifierCV
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

from sepc_torch.data.table_classifier import estimator_logits, estimator_scores
from sepc_torch.data.table_encoding import TableEncoding, parse_numbers
from sepc_torch.shapes import Array, Float

# Sparse features above this number are projected: a dense copy of bags of words would fill the memory.
_MAX_SPARSE = 512
_PROJECTED = 64
# Least log probability in place of features: one in a million. Forests give zero to many classes, which has none.
_LEAST_LOG = float(np.log(1e-6))


class EmbeddingWarning(UserWarning):
    """The features of a classifier are no numbers and no table: the head sees log probabilities in their place."""


@dataclass(frozen=True)
class ClassifierEmbedding:
    """Map from rows to the embeddings and logits that a trust head sees.

    Attributes:
        source: A callable ``(estimator, X) -> (n, D)``, the name of a pipeline step, or None for the features.
        features: How features become numbers: a :class:`~sepc_torch.data.table_encoding.TableEncoding` of the columns
            of a table, a fitted transformer of an array (imputation, scaling), or None if ``source`` gives embeddings
            or log probabilities take the place of features.
        loss: What is lost with log probabilities, as a sentence; None with features or embeddings.

    >>> from sklearn.linear_model import LogisticRegression
    >>> X, y = [[0.0, 1.0], [1.0, 3.0], [2.0, 5.0], [3.0, 8.0]], [0, 0, 1, 1]
    >>> estimator = LogisticRegression().fit(X, y)
    >>> z, logits = ClassifierEmbedding.fit(None, estimator, X)(estimator, X)
    >>> z.shape, logits.argmax(axis=1).tolist()
    ((4, 2), [0, 0, 1, 1])
    """

    source: Any
    features: Any
    loss: str | None = None

    @classmethod
    def fit(cls, source: Any, estimator: Any, X: Any) -> ClassifierEmbedding:
        """Fit the transformer of features to the rows of a fitted estimator."""
        if source is not None:
            return cls(source, None)
        x = _features(estimator, X)
        if (columns := _columns(x)) is not None:
            if (encoding := _encoding(columns)) is not None:
                return cls(None, encoding)
        elif sparse.issparse(x) and x.shape[1] > _MAX_SPARSE:
            return cls(None, make_pipeline(TruncatedSVD(_PROJECTED, random_state=0), StandardScaler()).fit(x))
        elif (numbers := _dense(x)) is not None:
            imputer = SimpleImputer(strategy="median", keep_empty_features=True, add_indicator=True)
            return cls(None, make_pipeline(imputer, StandardScaler()).fit(numbers))
        if estimator_scores(estimator, X) is None:
            raise ValueError(
                f"The head needs numbers, but the classifier's features ({type(x).__name__}) are neither numbers nor "
                "columns of a table, and the classifier has no probabilities. Pass embed=, a function of the fitted "
                "estimator and the rows."
            )
        return cls(
            None,
            None,
            f"The classifier's features ({type(x).__name__}) are neither numbers nor columns of a table, so the head "
            "sees the classifier's log probabilities: promises hold as before, but a row of an unknown kind of which "
            "the classifier is sure looks ordinary. Pass embed= to give the head numbers that show it.",
        )

    def embed(self, estimator: Any, X: Any) -> Float[Array, "B D"]:
        """Embeddings of rows."""
        if self.loss is not None:
            log = torch.from_numpy(estimator_logits(estimator, X)).log_softmax(dim=1)
            return log.clamp_min(_LEAST_LOG).numpy()
        if self.source is not None:
            found = _dense(_output(self.source, estimator, X))
            if found is None:
                raise ValueError(f"embed={self.source!r} must give numbers; it gave text or other objects.")
            return found
        x = _features(estimator, X)
        if isinstance(self.features, TableEncoding):
            return self.features.encode(_columns(x)).points
        if not isinstance(self.features[0], TruncatedSVD):
            x = _dense(x)
        return np.asarray(self.features.transform(x), dtype=np.float64)

    def __call__(self, estimator: Any, X: Any) -> tuple[Float[Array, "B D"], Float[Array, "B C"]]:
        """Embeddings and logits of rows."""
        return self.embed(estimator, X), estimator_logits(estimator, X)


def _output(source: Any, estimator: Any, X: Any) -> Any:
    """The output of the callable or of the pipeline's step."""
    if callable(source):
        return source(estimator, X)
    while not isinstance(estimator, Pipeline) and (inner := _inner(estimator)) is not None:
        estimator = inner
    if not isinstance(estimator, Pipeline):
        raise ValueError(f"embed={source!r} names a step, but the estimator is no Pipeline; pass a callable.")
    names = [name for name, _ in estimator.steps[:-1]]
    if source not in names:
        raise ValueError(f"embed={source!r} is no step before the classifier; the pipeline has {', '.join(names)}.")
    return estimator[: names.index(source) + 1].transform(X)


def _features(estimator: Any, X: Any) -> Any:
    """The features that the classifier within pipelines, searches and wrappers sees."""
    while True:
        if isinstance(estimator, Pipeline):
            X = estimator[:-1].transform(X) if len(estimator) > 1 else X
            estimator = estimator[-1]
        elif (inner := _inner(estimator)) is not None:
            estimator = inner
        else:
            return X


def _inner(estimator: Any) -> Any:
    """The fitted classifier that a search or a wrapper gives its rows to; None for other estimators.

    A calibration over folds has one for each fold; the steps of the first one stand for all.
    """
    if isinstance(estimator, FrozenEstimator):
        return estimator.estimator
    if isinstance(estimator, CalibratedClassifierCV):
        return estimator.calibrated_classifiers_[0].estimator
    if isinstance(estimator, FixedThresholdClassifier | TunedThresholdClassifierCV):
        return estimator.estimator_
    return getattr(estimator, "best_estimator_", None)


def _columns(x: Any) -> dict[str, Any] | None:
    """The columns of a table or of an array of objects by name; None for other features."""
    if hasattr(x, "columns"):
        names = [str(name) for name in x.columns]
        columns = [x.iloc[:, j] for j in range(len(names))] if hasattr(x, "iloc") else [x[name] for name in x.columns]
    elif isinstance(x, np.ndarray) and x.ndim == 2 and x.dtype.kind in "OSU" and _dense(x) is None:
        names, columns = [], list(x.T)
    else:
        return None
    if len(set(names)) < len(columns):
        names = [f"x{j}" for j in range(len(columns))]
    return dict(zip(names, columns, strict=True))


def _encoding(columns: dict[str, Any]) -> TableEncoding | None:
    """The encoding of columns, without those that hold no value; None if none is left."""
    categories = [name for name, column in columns.items() if _is_category(column)]
    numbers = [name for name in columns if name not in categories]
    numbers = [name for name in numbers if not np.isnan(parse_numbers(columns[name])[0]).all()]
    return TableEncoding.fit(columns, numbers, categories) if numbers or categories else None


def _is_category(column: Any) -> bool:
    """Whether a column holds categories or text, also if all of its categories are numbers."""
    values = np.asarray(column)
    named = str(column.dtype).lower().startswith(("categor", "enum"))
    # Objects of another kind than text are numbers with gaps, or dates, which count as categories.
    return named or (
        values.dtype.kind not in "biuf"
        and (any(isinstance(cell, str) for cell in values.tolist()) or bool(parse_numbers(values)[1].any()))
    )


def _dense(x: Any) -> Float[Array, "B D"] | None:
    """Numbers as a dense matrix; None if they are no numbers."""
    if sparse.issparse(x):
        x = x.toarray()
    try:
        found = np.asarray(x, dtype=np.float64)
    except (TypeError, ValueError):
        return None
    if found.ndim != 2:
        raise ValueError(f"Expected embeddings of shape (n_samples, n_embedding), got {found.shape}.")
    return found
