"""Embeddings and logits of rows, from a fitted scikit-learn classifier (extra ``sklearn``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse
from sklearn.decomposition import TruncatedSVD
from sklearn.impute import SimpleImputer
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

from sepc_torch.shapes import Array, Float

# Sparse features above this number are projected: a dense copy of bags of words would fill the memory.
_MAX_SPARSE = 512
_PROJECTED = 64
# The estimator's label gets at least this lead over the other logits, relative to 1 + |logit|: float32 keeps it, and
# the energy of the logits changes by less than the resolution of nonconformity scores.
_LEAD = 1e-6
# Energy of log probabilities. It is the same for every row; around zero its rounding errors would count as differences.
_ENERGY = -1.0
# Logit of the label of an estimator without scores: softmax then says the same of every row.
_PLAIN_LOGIT = 4.0


@dataclass(frozen=True)
class ClassifierEmbedding:
    """Map from rows to the embeddings and logits that a trust head sees.

    Attributes:
        source: A callable ``(estimator, X) -> (n, D)``, the name of a pipeline step, or None for the features.
        features: The fitted transformer of features (imputation, scaling); None if ``source`` gives embeddings.

    >>> from sklearn.linear_model import LogisticRegression
    >>> X, y = [[0.0, 1.0], [1.0, 3.0], [2.0, 5.0], [3.0, 8.0]], [0, 0, 1, 1]
    >>> estimator = LogisticRegression().fit(X, y)
    >>> z, logits = ClassifierEmbedding.fit(None, estimator, X)(estimator, X)
    >>> z.shape, logits.argmax(axis=1).tolist()
    ((4, 2), [0, 0, 1, 1])
    """

    source: Any
    features: Any

    @classmethod
    def fit(cls, source: Any, estimator: Any, X: Any) -> ClassifierEmbedding:
        """Fit the transformer of features to the rows of a fitted estimator."""
        if source is not None:
            return cls(source, None)
        x = _output(None, estimator, X)
        if sparse.issparse(x) and x.shape[1] > _MAX_SPARSE:
            return cls(None, make_pipeline(TruncatedSVD(_PROJECTED, random_state=0), StandardScaler()).fit(x))
        imputer = SimpleImputer(strategy="median", keep_empty_features=True, add_indicator=True)
        return cls(None, make_pipeline(imputer, StandardScaler()).fit(_dense(x)))

    def embed(self, estimator: Any, X: Any) -> Float[Array, "B D"]:
        """Embeddings of rows."""
        x = _output(self.source, estimator, X)
        if self.features is None:
            return np.asarray(_dense(x), dtype=np.float64)
        wide = isinstance(self.features[0], TruncatedSVD)
        return np.asarray(self.features.transform(x if wide else _dense(x)), dtype=np.float64)

    def __call__(self, estimator: Any, X: Any) -> tuple[Float[Array, "B D"], Float[Array, "B C"]]:
        """Embeddings and logits of rows."""
        return self.embed(estimator, X), estimator_logits(estimator, X)


def estimator_logits(estimator: Any, X: Any) -> Float[Array, "B C"]:
    r"""Logits of a classifier, of which the largest one belongs to its label in every row.

    They are its decision function (:math:`\mp d / 2` for two classes), or one plus the logarithm of its probabilities.
    An estimator without either has the same logits for every row of a label.

    >>> from sklearn.neighbors import KNeighborsClassifier
    >>> tie = KNeighborsClassifier(2).fit([[0.0], [1.0]], ["a", "b"])
    >>> estimator_logits(tie, [[0.5]]).round(3)
    array([[0.307, 0.307]])
    >>> estimator_logits(tie, [[0.5]]).argmax()
    np.int64(0)
    """
    classes = np.asarray(estimator.classes_)
    label = np.searchsorted(classes, np.asarray(estimator.predict(X)))
    logits = _scores(estimator, X, len(classes))
    if logits is None:
        logits = np.where(label[:, None] == np.arange(len(classes)), _PLAIN_LOGIT, 0.0)
    rows = np.arange(len(label))
    others = logits.copy()
    others[rows, label] = -np.inf
    best = others.max(axis=1, initial=-np.finfo(np.float32).max)
    # Probabilities of forests have ties, and the labels of a support vector machine need not be its largest score.
    logits[rows, label] = np.maximum(logits[rows, label], best + _LEAD * (1.0 + np.abs(best)))
    return logits


def _scores(estimator: Any, X: Any, classes: int) -> Float[Array, "B C"] | None:
    """Decision function or log probabilities; None if the estimator has neither for every class."""
    if hasattr(estimator, "decision_function"):
        score = np.asarray(estimator.decision_function(X), dtype=np.float64)
        if score.ndim == 1 and classes == 2:
            return np.stack([-score / 2, score / 2], axis=1)
        if score.shape[1:] == (classes,):
            return score
    if hasattr(estimator, "predict_proba"):
        with np.errstate(divide="ignore"):
            return np.log(np.asarray(estimator.predict_proba(X), dtype=np.float64)) - _ENERGY
    return None


def _output(source: Any, estimator: Any, X: Any) -> Any:
    """The output of the callable or of the pipeline's step, or the features of the classifier for None."""
    if callable(source):
        return source(estimator, X)
    estimator = getattr(estimator, "best_estimator_", estimator)  # a search over parameters holds its pipeline
    if source is None:
        return estimator[:-1].transform(X) if isinstance(estimator, Pipeline) and len(estimator) > 1 else X
    if not isinstance(estimator, Pipeline):
        raise ValueError(f"embed={source!r} names a step, but the estimator is no Pipeline; pass a callable.")
    names = [name for name, _ in estimator.steps[:-1]]
    if source not in names:
        raise ValueError(f"embed={source!r} is no step before the classifier; the pipeline has {', '.join(names)}.")
    return estimator[: names.index(source) + 1].transform(X)


def _dense(x: Any) -> Float[Array, "B D"]:
    """Numbers as a dense matrix."""
    if sparse.issparse(x):
        x = x.toarray()
    try:
        found = np.asarray(x, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(
            "The head needs numbers, but the features hold text or categories. Put a ColumnTransformer before the "
            "classifier (make_pipeline(transformer, classifier)), or pass embed=."
        ) from error
    if found.ndim != 2:
        raise ValueError(f"Expected embeddings of shape (n_samples, n_embedding), got {found.shape}.")
    return found
