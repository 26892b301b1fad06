"""Scikit-learn classifier that says which of its labels to accept, around any other classifier (extra ``sklearn``)."""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import Any

import numpy as np
import sklearn
from sklearn.base import BaseEstimator, ClassifierMixin, MetaEstimatorMixin
from sklearn.utils import check_random_state, get_tags, indexable
from sklearn.utils.metadata_routing import MetadataRouter, MethodMapping, process_routing
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from sepc_torch.classifier_calibration import ClassifierTraining, keep_promise
from sepc_torch.classifier_embedding import ClassifierEmbedding
from sepc_torch.data.text_table import printable
from sepc_torch.head.conformal import check_share
from sepc_torch.head.explanation import DecisionExplanation
from sepc_torch.head.label_calibration import Acceptance
from sepc_torch.head.prediction import HeadPrediction
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.shapes import Array, Bool, Float


class CalibrationWarning(UserWarning):
    """There are too few rows to calibrate with, or to keep the wanted promise."""


def _estimator_has(method: str) -> Any:
    """Whether the fitted or, before ``fit``, the given estimator has a method; for ``available_if``."""

    def check(self: TrustClassifier) -> bool:
        getattr(getattr(self, "estimator_", self.estimator), method)
        return True

    return check


class TrustClassifier(MetaEstimatorMixin, ClassifierMixin, BaseEstimator):  # type: ignore[misc] # no types
    r"""Any scikit-learn classifier, with a calibrated confidence and a decision to accept for each of its labels.

    ``fit`` fits a clone of the estimator, fits a :class:`~sepc_torch.TrustHead` to its training rows, and calibrates
    the head with rows that neither has seen. The labels are those of the estimator.

    Parameters
    ----------
    estimator : classifier
        A scikit-learn classifier, or a pipeline that ends with one.
    embed : callable, str or None, default=None
        The numbers that the head sees. None: the features of the classifier; for a pipeline the output of all steps
        before the last. They are imputed (median) and standardised; sparse features are projected on 64 dimensions if
        there are more than 512. A string: the output of the pipeline's step of that name. A callable:
        ``embed(estimator_, X)`` returns an array of shape (n_samples, n_embedding), for example the last hidden layer
        of a network.
    risk : float or None, default=None
        Largest share of wrong labels among the accepted ones, kept with probability ``1 - delta`` over the
        calibration rows. None: ``flag_rate`` decides.
    flag_rate : float, default=0.05
        Share of rows like the calibration rows that may be refused, on average over calibration sets;
        used if ``risk`` is None.
    delta : float, default=0.05
        Probability that the promise of ``risk`` may fail.
    cv : int, splitter, iterable or None, default=None
        None holds ``calibration_size`` of the rows back. Otherwise estimator and head are fitted once for each fold
        and once on all rows; see the Notes for the promise.
    calibration_size : float, default=0.25
        Share of the rows that only calibrate.
    reject_label : label or None, default=None
        Label that ``predict`` returns for refused rows. None: ``predict`` returns the estimator's labels only.
    keep_points : bool, default=False
        Whether ``head_`` keeps its training points, so that it can be updated:
        ``head_.update(embedding_.embed(estimator_, X), y)``.
    random_state : int, RandomState instance or None, default=0
        Seed of the split into fitting and calibration rows, and of the choice of calibration rows that set thresholds.

    Attributes
    ----------
    estimator_ : classifier
        The fitted clone.
    head_ : TrustHead
        The head; ``head_.save(path)`` writes it for use without scikit-learn.
    acceptance_ : Acceptance or None
        Threshold, coverage and error on the calibration rows that set the threshold; None without a calibration.
    embedding_ : ClassifierEmbedding
        From rows to the numbers that the head sees.
    classes_ : ndarray of shape (n_classes,)
        The labels, in the order of ``predict_proba``.
    n_features_in_ : int
        Number of features seen in ``fit``.
    feature_names_in_ : ndarray of shape (n_features,)
        Names of the features, if ``X`` has column names that are all strings.

    Notes
    -----
    *Promise with a calibration part.* For rows drawn independently from the distribution of the training rows, the
    promise of ``risk`` or ``flag_rate`` holds exactly, for every estimator and every number of rows
    (:mod:`sepc_torch.head.conformal`). It says nothing about rows from another distribution, about single classes or
    groups, and about rows that were chosen because of their scores. If the calibration part holds all rows of a class,
    these rows fit instead, and the promise covers the other classes.

    *Promise with* ``cv``. Out-of-fold logits and evidence calibrate a head that is fitted on all rows. All rows train
    the estimator, but the promise is not exact: the calibrated models are not the final one. The final model has seen
    more rows and is typically better, so the error is typically below the promised one; nothing proves it.

    *Few rows.* With less than 20 calibration rows, ``fit`` uses all rows for the estimator and warns with
    :class:`CalibrationWarning`; ``accept`` is then False everywhere. ``sample_weight`` and other parameters of ``fit``
    reach the estimator only: the promise is for the rows as they are drawn.

    ``score`` counts refused rows as wrong if ``reject_label`` is given.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> from sklearn.linear_model import LogisticRegression
    >>> from sklearn.pipeline import make_pipeline
    >>> from sklearn.preprocessing import StandardScaler
    >>> X, y = load_digits(return_X_y=True)
    >>> model = TrustClassifier(make_pipeline(StandardScaler(), LogisticRegression()), reject_label=-1)
    >>> model = model.fit(X[:900], y[:900])
    >>> accept = model.accept(X[900:])
    >>> bool(accept.mean() > 0.8), bool((model.predict(X[900:])[~accept] == -1).all())
    (True, True)
    """

    def __init__(
        self,
        estimator: Any,
        *,
        embed: Any = None,
        risk: Any = None,
        flag_rate: Any = 0.05,
        delta: Any = 0.05,
        cv: Any = None,
        calibration_size: Any = 0.25,
        reject_label: Any = None,
        keep_points: Any = False,
        random_state: Any = 0,
    ) -> None:
        self.estimator = estimator
        self.embed = embed
        self.risk = risk
        self.flag_rate = flag_rate
        self.delta = delta
        self.cv = cv
        self.calibration_size = calibration_size
        self.reject_label = reject_label
        self.keep_points = keep_points
        self.random_state = random_state

    estimator_: Any
    head_: TrustHead
    acceptance_: Acceptance | None
    embedding_: ClassifierEmbedding
    classes_: Array
    n_features_in_: int
    feature_names_in_: Array

    def fit(self, X: Any, y: Any, **fit_params: Any) -> TrustClassifier:
        """Fit the estimator and the head, and calibrate the head.

        Parameters
        ----------
        X : {array-like, sparse matrix, dataframe} of shape (n_samples, n_features)
            Training rows, in any form that the estimator takes.
        y : array-like of shape (n_samples,)
            Labels.
        **fit_params : dict
            Parameters of the estimator's ``fit``, such as ``sample_weight``; with metadata routing those that the
            estimator requests.

        Returns
        -------
        self : TrustClassifier
            The fitted classifier.
        """
        if self.risk is not None:
            check_share(self.risk, "risk")
        check_share(self.flag_rate, "flag_rate")
        check_share(self.calibration_size, "calibration_size")
        validate_data(self, X, y, skip_check_array=True)
        X, y = indexable(X, y)
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        if sklearn.get_config()["enable_metadata_routing"]:
            fit_params = process_routing(self, "fit", **fit_params).estimator.fit
        if self.reject_label is not None and self.reject_label in y.tolist():
            raise ValueError(f"reject_label={printable(self.reject_label)} is a label of y; choose another one.")
        random = check_random_state(self.random_state)
        training = ClassifierTraining(self.estimator, self.embed, X, y, fit_params, self.keep_points)
        if self.cv is None:
            fitted = training.calibrate_with_part(self.calibration_size, random)
        else:
            fitted = training.calibrate_with_folds(self.cv, random)
        self.estimator_, self.embedding_, self.head_, shortfall = fitted
        self.classes_ = self.estimator_.classes_
        self.acceptance_ = None
        if shortfall is None:
            self.acceptance_, shortfall = keep_promise(
                self.head_,
                risk=self.risk,
                flag_rate=self.flag_rate,
                delta=self.delta,
                rows_per_point=1.0 / self.calibration_size if self.cv is None else 1.0,
            )
        if shortfall is not None:
            warnings.warn(shortfall, CalibrationWarning, stacklevel=2)
        return self

    def predict(self, X: Any) -> Array:
        """Predict the estimator's label of every row; refused rows get ``reject_label``, if there is one.

        Parameters
        ----------
        X : {array-like, sparse matrix, dataframe} of shape (n_samples, n_features)
            Rows.

        Returns
        -------
        y : ndarray of shape (n_samples,)
            Labels. Their type is object if ``reject_label`` is not of the type of the labels.
        """
        X = self._rows(X)
        labels = np.asarray(self.estimator_.predict(X))
        if self.reject_label is None:
            return labels
        refusal = np.asarray(self.reject_label)
        if (refusal.dtype.kind in "US") != (labels.dtype.kind in "US") or refusal.dtype.kind == "b":
            labels = labels.astype(object)
        return np.where(self.accept(X), labels, self.reject_label)

    @available_if(_estimator_has("predict_proba"))  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any) -> Float[Array, "B C"]:
        """Probabilities of the classes according to the estimator; ``confidence`` is the calibrated one.

        Parameters
        ----------
        X : {array-like, sparse matrix, dataframe} of shape (n_samples, n_features)
            Rows.

        Returns
        -------
        proba : ndarray of shape (n_samples, n_classes)
            Probabilities in the order of ``classes_``.
        """
        X = self._rows(X)
        return self.estimator_.predict_proba(X)

    @available_if(_estimator_has("decision_function"))  # type: ignore[untyped-decorator]
    def decision_function(self, X: Any) -> Array:
        """Decision function of the estimator.

        Parameters
        ----------
        X : {array-like, sparse matrix, dataframe} of shape (n_samples, n_features)
            Rows.

        Returns
        -------
        score : ndarray of shape (n_samples,) or (n_samples, n_classes)
            As the estimator returns it.
        """
        X = self._rows(X)
        return self.estimator_.decision_function(X)

    def judge(self, X: Any) -> HeadPrediction:
        """Assess the estimator's labels: all fields of :class:`~sepc_torch.HeadPrediction`, as tensors.

        Parameters
        ----------
        X : {array-like, sparse matrix, dataframe} of shape (n_samples, n_features)
            Rows.

        Returns
        -------
        out : HeadPrediction
            ``network_label`` is the index of the estimator's label in ``classes_``.
        """
        X = self._rows(X)
        return self.head_.judge(*self.embedding_(self.estimator_, X))

    def confidence(self, X: Any) -> Float[Array, "B"]:
        """Calibrated probability that the estimator's label is right, provided that the row is of a known kind.

        Parameters
        ----------
        X : {array-like, sparse matrix, dataframe} of shape (n_samples, n_features)
            Rows.

        Returns
        -------
        confidence : ndarray of shape (n_samples,)
            Probabilities. Without a calibration they only rank.
        """
        return self.judge(X).confidence.numpy()

    def explain(self, X: Any) -> list[DecisionExplanation]:
        """Explain the decisions about rows: accepted or refused, why, and similar training rows.

        Parameters
        ----------
        X : {array-like, sparse matrix, dataframe} of shape (n_samples, n_features)
            Rows.

        Returns
        -------
        explanations : list of DecisionExplanation
            One for each row; see :meth:`sepc_torch.TrustHead.explain`. Examples are named by their position among
            the rows that the head was fitted to.
        """
        z, logits = self.embedding_(self.estimator_, self._rows(X))
        found = self.head_.explain(z, logits=logits)
        assert isinstance(found, list)  # one for each row
        return found

    def accept(self, X: Any) -> Bool[Array, "B"]:
        """Whether to accept the estimator's label of every row, at the promised ``risk`` or ``flag_rate``.

        Parameters
        ----------
        X : {array-like, sparse matrix, dataframe} of shape (n_samples, n_features)
            Rows.

        Returns
        -------
        accept : ndarray of shape (n_samples,)
            True for accepted rows.
        """
        return self.judge(X).accept.numpy()

    def get_metadata_routing(self) -> MetadataRouter:
        """Route the parameters of ``fit`` to the estimator.

        Returns
        -------
        routing : MetadataRouter
            The routing.
        """
        mapping = MethodMapping().add(caller="fit", callee="fit")
        return MetadataRouter(owner=self.__class__.__name__).add(estimator=self.estimator, method_mapping=mapping)

    def __sklearn_tags__(self) -> Any:
        tags, inner = super().__sklearn_tags__(), get_tags(self.estimator)
        tags.input_tags, tags.classifier_tags = deepcopy(inner.input_tags), deepcopy(inner.classifier_tags)
        tags.classifier_tags.multi_label = False
        return tags

    def _rows(self, X: Any) -> Any:
        """Check the features by name and number; raise NotFittedError first if the classifier is not fitted."""
        check_is_fitted(self)
        if getattr(X, "ndim", 2) == 1:
            raise ValueError(
                "Expected 2D array, got 1D array instead. Reshape your data: X.reshape(1, -1) if it is one row."
            )
        validate_data(self, X, reset=False, skip_check_array=True)
        return X
