"""Scikit-learn classifier that says which of its labels to accept, around any other classifier (extra ``sklearn``)."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, ClassVar

import numpy as np
import sklearn
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, MetaEstimatorMixin
from sklearn.utils import check_random_state, get_tags, indexable
from sklearn.utils.metadata_routing import MetadataRouter, MethodMapping, process_routing
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _num_samples, check_consistent_length, check_is_fitted, column_or_1d, validate_data

from sepc_torch.data.options import check_choice, check_count
from sepc_torch.data.table_classifier import estimator_labels
from sepc_torch.data.text import printable
from sepc_torch.data.warn import warn_user
from sepc_torch.head.calibration.label_calibration import Acceptance
from sepc_torch.head.explanation import DecisionExplanation
from sepc_torch.head.prediction import HeadPrediction
from sepc_torch.head.promises.conformal import check_share
from sepc_torch.head.promises.costs import CostAcceptance
from sepc_torch.head.promises.groups import GroupAcceptance
from sepc_torch.head.reading.sources import row_ids
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.metrics.selective import coverage_at_risk
from sepc_torch.shapes import Array, Bool, Float, Int
from sepc_torch.sklearn.calibration import ClassifierTraining, Wish, keep_promise
from sepc_torch.sklearn.embedding import ClassifierEmbedding, EmbeddingWarning

# The label's probability is larger than all others by this share: the estimator's label is the only largest one.
_LEAD = 1e-9
# Groups that the caller gives, known of new rows or not; the others follow from the rows.
_GIVEN = ("group", "environment")


class CalibrationWarning(UserWarning):
    """There are too few rows to calibrate with, or to keep the wanted promise."""


class TrustClassifier(MetaEstimatorMixin, ClassifierMixin, BaseEstimator):  # type: ignore[misc] # no types
    r"""Any scikit-learn classifier, with a calibrated confidence and a decision to accept for each of its labels.

    ``fit`` fits a clone of the estimator, fits a :class:`~sepc_torch.TrustHead` to its training rows, and calibrates
    the head with rows that neither has seen. The labels are those of the estimator.

    Parameters
    ----------
    estimator : classifier
        A scikit-learn classifier, or a pipeline that ends with one. ``FrozenEstimator(fitted)`` keeps a fitted one as
        it is; the calibration rows must then be rows that it was not fitted to.
    embed : callable, str or None, default=None
        The numbers that the head sees. None: the features of the classifier itself, inside pipelines, searches,
        ``CalibratedClassifierCV`` (the first fold's), ``FrozenEstimator`` and threshold classifiers. Numbers are
        imputed (median) and standardised; sparse features are projected on 64 dimensions if there are more than 512.
        The columns of a table are encoded by name: text and categories become a feature for each frequent category.
        If the features are neither numbers nor a table, the head sees log probabilities, and ``fit`` warns with
        :class:`EmbeddingWarning` of what is lost. A string: the output of the pipeline's step of that name. A callable:
        ``embed(estimator_, X)`` returns an array of shape (n_samples, n_embedding), for example the last hidden layer
        of a network.
    risk : float or None, default=None
        Largest share of wrong labels among the accepted ones, kept with probability ``1 - delta`` over the
        calibration rows. None: ``costs`` or ``flag_rate`` decide.
    flag_rate : float, default=0.05
        Share of rows like the calibration rows that may be refused, on average over calibration sets;
        used if ``risk`` and ``costs`` are None.
    delta : float, default=0.05
        Probability that the promise of ``risk`` or ``costs`` may fail.
    by : {"predicted", "region", "class", "group", "environment"} or None, default=None
        Keep ``risk`` in every group instead of on average: in each predicted class, region or true class, or in each of
        the ``groups`` given to ``fit``. Groups of ``"group"`` are known of new rows, and ``accept`` takes them; those
        of ``"environment"`` are not, such as the hospital of a future patient. See
        :meth:`sepc_torch.TrustHead.accept_at`.
    costs : float, array-like of shape (n_classes, n_classes) or None, default=None
        The cost of accepting each predicted class (column) for a row of each true class (row), in the order of the
        sorted labels, or the cost of any mistake. Thresholds have the least expected cost of a row, with a bound that
        holds with probability ``1 - delta`` (``acceptance_.bound``).
    review : float or None, default=None
        The cost of a refused row; needed with ``costs``.
    average : bool, default=False
        Promise ``risk`` on average over calibration sets, without ``delta``. With few rows this accepts far more, and
        the risk of the calibration at hand is above the promised one about as often as below.
    cv : int, splitter, iterable or None, default=None
        None holds ``calibration_size`` of the rows back. Otherwise estimator and head are fitted once for each fold
        and once on all rows, which takes about as many times as long as there are folds, and the promise becomes an
        estimate; see the Notes.
    calibration_size : float, default=0.25
        Share of the rows that only calibrate. With ``fit(..., X_calibration=...)`` it has no effect: all rows train.
    score_folds : int or None, default=None
        Folds of the training rows whose out-of-fold evidence fits the head's scores, so that all calibration rows set
        the threshold. Estimator and head are fitted once more for each fold. 0 fits the scores to a fifth of the
        calibration rows, which costs accepted rows if these are few. None: 3 for ``risk`` or ``costs`` with fewer than
        5000 calibration rows, otherwise 0. There are no such folds with ``cv``, for a fitted estimator
        (``FrozenEstimator``), for a class with fewer rows than folds, and with ``groups`` of ``X_calibration``.
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
    acceptance_ : Acceptance, GroupAcceptance, CostAcceptance or None
        Threshold, coverage and error on the calibration rows that set the threshold; with ``by`` of each group, with
        ``costs`` also the cost and its bound; None without a calibration.
    embedding_ : ClassifierEmbedding
        From rows to the numbers that the head sees; ``embedding_.loss`` says what is lost if these are log
        probabilities.
    groups_ : ndarray of shape (n_groups,) or None
        The names of the groups given to ``fit``.
    classes_ : ndarray of shape (n_classes,)
        The labels, in the order of ``predict_proba``.
    n_features_in_ : int
        Number of features seen in ``fit``.
    feature_names_in_ : ndarray of shape (n_features,)
        Names of the features, if ``X`` has column names that are all strings.

    Notes
    -----
    *Promise with a calibration part.* For rows drawn independently from the distribution of the training rows, the
    promise of ``risk``, ``flag_rate`` or ``costs`` holds exactly, for every estimator and every number of rows
    (:mod:`sepc_torch.head.promises.conformal`). It says nothing about rows from another distribution, about single
    classes or groups unless ``by`` names them, and about rows that were chosen because of their scores. If the
    calibration part holds all rows of a class, these rows fit instead, and the promise covers the other classes. The
    same holds for ``X_calibration``, for rows drawn like these.

    *A search over parameters.* ``scoring=TrustClassifier.score_at_risk`` chooses what accepts most. The rows that chose
    the parameters then also calibrate the refitted classifier, so that its promise is slightly optimistic; pass rows of
    their own (``search.fit(X, y, X_calibration=..., y_calibration=...)``) for an exact one.

    *Promise with* ``cv``. Out-of-fold logits and evidence calibrate a head that is fitted on all rows. All rows train
    the estimator, but promises and p-values are estimates (``head_.promise.exact`` is False): the calibrated models are
    not the final one. The final model has seen more rows and is typically better, so the error is typically below the
    promised one; nothing proves it. Groups of ``by="predicted"`` are those of the labels that the folds' classifiers
    gave, regions those of the final head. A :class:`~sepc_torch.DriftMonitor` refuses such a head. ``cv=k`` costs k
    further fits of estimator and head.

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
        by: Any = None,
        costs: Any = None,
        review: Any = None,
        average: Any = False,
        cv: Any = None,
        calibration_size: Any = 0.25,
        score_folds: Any = None,
        reject_label: Any = None,
        keep_points: Any = False,
        random_state: Any = 0,
    ) -> None:
        self.estimator = estimator
        self.embed = embed
        self.risk = risk
        self.flag_rate = flag_rate
        self.delta = delta
        self.by = by
        self.costs = costs
        self.review = review
        self.average = average
        self.cv = cv
        self.calibration_size = calibration_size
        self.score_folds = score_folds
        self.reject_label = reject_label
        self.keep_points = keep_points
        self.random_state = random_state

    # Scores are unweighted unless set_score_request asks for weights: those of fit are the estimator's.
    __metadata_request__score: ClassVar = {"sample_weight": False}

    estimator_: Any
    head_: TrustHead
    acceptance_: Acceptance | GroupAcceptance | CostAcceptance | None
    embedding_: ClassifierEmbedding
    groups_: Array | None
    classes_: Array
    n_features_in_: int
    feature_names_in_: Array

    def fit(
        self,
        X: Any,
        y: Any,
        X_calibration: Any = None,
        y_calibration: Any = None,
        groups: Any = None,
        **fit_params: Any,
    ) -> TrustClassifier:
        """Fit the estimator and the head, and calibrate the head.

        Parameters
        ----------
        X : {array-like, sparse matrix, dataframe} of shape (n_samples, n_features)
            Training rows, in any form that the estimator takes.
        y : array-like of shape (n_samples,)
            Labels.
        X_calibration : {array-like, sparse matrix, dataframe} of shape (n_calibration, n_features), default=None
            Rows that only calibrate, drawn like the rows in use; all rows of ``X`` then train. None: ``cv`` or
            ``calibration_size`` decide which rows of ``X`` calibrate.
        y_calibration : array-like of shape (n_calibration,), default=None
            Labels of ``X_calibration``.
        groups : array-like of shape (n_samples,) or (n_calibration,), default=None
            Groups of the rows for ``by="group"`` or ``by="environment"``, integers or strings: of ``X_calibration`` if
            it is given, otherwise of ``X``.
        **fit_params : dict
            Parameters of the estimator's ``fit``, such as ``sample_weight``; with metadata routing those that the
            estimator requests.

        Returns
        -------
        self : TrustClassifier
            The fitted classifier.
        """
        wish = self._wish(groups)
        validate_data(self, X, y, skip_check_array=True)
        X, y = indexable(X, y)
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        if (X_calibration is None) != (y_calibration is None):
            raise ValueError("X_calibration are rows and y_calibration their labels: pass both.")
        if X_calibration is not None:
            if self.cv is not None:
                raise ValueError("cv calibrates with the rows of X; leave out cv, or X_calibration.")
            validate_data(self, X_calibration, reset=False, skip_check_array=True)
            y_calibration = column_or_1d(y_calibration, warn=True)
            check_consistent_length(X_calibration, y_calibration)
            if unknown := sorted(map(repr, set(y_calibration.tolist()) - set(y.tolist()))):
                raise ValueError(f"y_calibration holds the labels {', '.join(unknown[:5])}, which y does not hold.")
        self.groups_, codes = None, None
        if groups is not None:
            names = row_ids(groups, len(y) if y_calibration is None else len(y_calibration), "groups")
            self.groups_, codes = np.unique(names, return_inverse=True)
        if sklearn.get_config()["enable_metadata_routing"]:
            fit_params = process_routing(self, "fit", **fit_params).estimator.fit
        if self.reject_label is not None and self.reject_label in y.tolist():
            raise ValueError(f"reject_label={printable(self.reject_label)} is a label of y; choose another one.")
        random = check_random_state(self.random_state)
        score_folds = self.score_folds
        if (codes is not None and y_calibration is not None) or (score_folds is None and wish.for_rate):
            score_folds = 0
        training = ClassifierTraining(self.estimator, self.embed, X, y, fit_params, self.keep_points, score_folds)
        given, rows = len(y), "rows of X"
        if y_calibration is not None:
            fitted = training.calibrate_with_rows(X_calibration, y_calibration, random)
            given, rows = len(y_calibration), "rows of X_calibration"
            codes = None if codes is None else np.append(np.zeros_like(codes, shape=len(y)), codes)
        elif self.cv is None:
            fitted = training.calibrate_with_part(self.calibration_size, random)
        else:
            fitted = training.calibrate_with_folds(self.cv, random)
        self.estimator_, self.embedding_, self.head_, shortfall = fitted[:4]
        self.classes_ = self.estimator_.classes_
        self.acceptance_ = None
        if self.embedding_.loss is not None:
            warn_user(self.embedding_.loss, EmbeddingWarning)
        if shortfall is None:
            of_rows = None if codes is None else codes[fitted.rows]
            self.acceptance_, shortfall = keep_promise(self.head_, wish, of_rows, given / len(fitted.rows), rows)
        if shortfall is not None:
            warn_user(shortfall, CalibrationWarning)
        return self

    def _wish(self, groups: Any) -> Wish:
        """Check the parameters of the promise, before anything is fitted."""
        for name in ("risk", "flag_rate", "delta", "calibration_size"):
            if getattr(self, name) is not None:
                check_share(getattr(self, name), name)
        if self.score_folds is not None and check_count(self.score_folds, "score_folds") == 1:
            raise ValueError("One fold would leave no rows to fit; pass score_folds=2 or more, or 0 for no folds.")
        if self.by is not None:
            check_choice("by", self.by, ("predicted", "region", "class", *_GIVEN))
        if self.risk is None and (self.by is not None or self.average):
            raise ValueError("by= and average=True are for a risk; pass risk= too.")
        if self.by is not None and self.average:
            raise ValueError("average=True is for a risk over all rows; leave out by=.")
        if (self.costs is None) != (self.review is None):
            raise ValueError("costs are those of accepted labels, review is that of a refused row: pass both.")
        if self.costs is not None and self.risk is not None:
            raise ValueError("Pass risk= or costs=, not both.")
        if (groups is None) == (self.by in _GIVEN):
            raise ValueError(
                f"by={self.by!r} needs the group of every row: fit(X, y, groups=...)."
                if groups is None
                else "groups are for by='group' or by='environment'; leave them out, or set by=."
            )
        promised = (self.by, self.costs, self.review, self.average)
        return Wish(self.risk, self.flag_rate, self.delta, *promised)

    def predict(self, X: Any, groups: Any = None) -> Array:
        """Predict the estimator's label of every row; refused rows get ``reject_label``, if there is one.

        Parameters
        ----------
        X : {array-like, sparse matrix, dataframe} of shape (n_samples, n_features)
            Rows.
        groups : array-like of shape (n_samples,), default=None
            Groups of the rows; needed with ``by="group"`` and a ``reject_label``.

        Returns
        -------
        y : ndarray of shape (n_samples,)
            Labels. Their type is object if ``reject_label`` is not of the type of the labels.
        """
        X = self._rows(X)
        labels = estimator_labels(self.estimator_, X)
        if self.reject_label is None:
            return labels
        refusal = np.asarray(self.reject_label)  # with a type of its own: -1 among labels of eight bits would be 255
        if (refusal.dtype.kind in "US") != (labels.dtype.kind in "US") or refusal.dtype.kind == "b":
            labels = labels.astype(object)
        elif np.result_type(labels, refusal).kind == "f" and refusal.dtype.kind in "iu" and labels.dtype.kind in "iu":
            labels = labels.astype(object)  # no type of integers holds both
        return np.where(self.accept(X, groups), labels, self.reject_label if labels.dtype == object else refusal)

    def predict_proba(self, X: Any) -> Float[Array, "B C"]:
        """Calibrated probabilities of the classes, provided that the rows are of a known kind.

        The probability of the estimator's label is its ``confidence``; the other classes share the rest
        (:meth:`sepc_torch.TrustHead.predict_proba`). Where another class would then be more probable than the label,
        both get their mean, so that the largest probability belongs to the estimator's label. Without a calibration
        the probabilities are the estimator's, if it has any.

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
        if self.acceptance_ is None and hasattr(self.estimator_, "predict_proba"):
            return self.estimator_.predict_proba(X)
        z, logits = self.embedding_(self.estimator_, X)
        return _led_by(self.head_.predict_proba(z, logits).double().cpu().numpy(), logits.argmax(axis=1))

    def judge(self, X: Any, groups: Any = None) -> HeadPrediction:
        """Assess the estimator's labels: all fields of :class:`~sepc_torch.HeadPrediction`, as tensors.

        Parameters
        ----------
        X : {array-like, sparse matrix, dataframe} of shape (n_samples, n_features)
            Rows.
        groups : array-like of shape (n_samples,), default=None
            Groups of the rows; needed with ``by="group"``. Nothing is accepted in a group that ``fit`` has not seen.

        Returns
        -------
        out : HeadPrediction
            ``network_label`` is the index of the estimator's label in ``classes_``.
        """
        X = self._rows(X)
        return self.head_.judge(*self.embedding_(self.estimator_, X), self._codes(X, groups))

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
        return self._scored(self._rows(X)).confidence.numpy()

    def score_at_risk(self, X: Any, y: Any, risk: float | None = None) -> float:
        """Largest share of the rows that can be accepted, in the order of their joint scores, at a risk.

        This ranks classifiers by how much they let one accept, for the choice of models and parameters:
        ``GridSearchCV(model, grid, scoring=TrustClassifier.score_at_risk)``. It is measured on these rows and promises
        nothing.

        Parameters
        ----------
        X : {array-like, sparse matrix, dataframe} of shape (n_samples, n_features)
            Rows that the classifier was not fitted to.
        y : array-like of shape (n_samples,)
            True labels.
        risk : float or None, default=None
            Largest share of wrong labels among the accepted ones. None: the classifier's ``risk``.

        Returns
        -------
        share : float
            Share of the rows, from 0 to 1.
        """
        X = self._rows(X)
        wanted = self.risk if risk is None else risk
        if wanted is None:
            raise ValueError(
                "The classifier promises no risk; pass risk=, for example functools.partial(..., risk=.05)."
            )
        truth = column_or_1d(y, warn=True)
        check_consistent_length(X, truth)
        out = self._scored(X)
        right = self.classes_[out.network_label.numpy()] == truth
        score = out.confidence if self.acceptance_ is None else out.joint
        return float(coverage_at_risk(score, torch.from_numpy(right), check_share(wanted, "risk")))

    def explain(self, X: Any, groups: Any = None) -> list[DecisionExplanation]:
        """Explain the decisions about rows: accepted or refused, why, and similar training rows.

        Parameters
        ----------
        X : {array-like, sparse matrix, dataframe} of shape (n_samples, n_features)
            Rows.
        groups : array-like of shape (n_samples,), default=None
            Groups of the rows; needed with ``by="group"``. Nothing is accepted in a group that ``fit`` has not seen.

        Returns
        -------
        explanations : list of DecisionExplanation
            One for each row; see :meth:`sepc_torch.TrustHead.explain`. Examples are named by their position in the
            ``X`` of :meth:`fit`.
        """
        z, logits = self.embedding_(self.estimator_, self._rows(X))
        found = self.head_._explain(z, None, logits, self._codes(X, groups), None, "classifier")
        assert isinstance(found, list)  # one for each row
        return found

    def accept(self, X: Any, groups: Any = None) -> Bool[Array, "B"]:
        """Whether to accept the estimator's label of every row, at the promised ``risk`` or ``flag_rate``.

        Parameters
        ----------
        X : {array-like, sparse matrix, dataframe} of shape (n_samples, n_features)
            Rows.
        groups : array-like of shape (n_samples,), default=None
            Groups of the rows; needed with ``by="group"``. Nothing is accepted in a group that ``fit`` has not seen.

        Returns
        -------
        accept : ndarray of shape (n_samples,)
            True for accepted rows.
        """
        return self.judge(X, groups).accept.numpy()

    def get_metadata_routing(self) -> MetadataRouter:
        """Route the parameters of ``fit`` to the estimator, and ``groups`` and calibration rows to this classifier.

        Returns
        -------
        routing : MetadataRouter
            The routing.
        """
        mapping = MethodMapping().add(caller="fit", callee="fit")
        router = MetadataRouter(owner=self.__class__.__name__).add_self_request(self)
        return router.add(estimator=self.estimator, method_mapping=mapping)

    def __sklearn_tags__(self) -> Any:
        tags, inner = super().__sklearn_tags__(), get_tags(self.estimator)
        if inner.classifier_tags is None:
            raise TypeError(f"The estimator must be a classifier, got {type(self.estimator).__name__}.")
        tags.input_tags, tags.classifier_tags = deepcopy(inner.input_tags), deepcopy(inner.classifier_tags)
        tags.classifier_tags.multi_label = False
        return tags

    def _rows(self, X: Any) -> Any:
        """Check the features by name and number; raise NotFittedError first if the classifier is not fitted."""
        check_is_fitted(self)
        if getattr(X, "ndim", 2) == 1 and np.asarray(X).dtype.kind in "biufc":  # texts are rows of a vectoriser
            raise ValueError(
                "Expected 2D array, got 1D array instead. Reshape your data: X.reshape(1, -1) if it is one row."
            )
        validate_data(self, X, reset=False, skip_check_array=True)
        return X

    def _scored(self, X: Any) -> HeadPrediction:
        """Scores of checked rows, which depend on no group; ``accept`` does."""
        nowhere = np.full(_num_samples(X), -1) if self._accepts_by_group() else None
        return self.head_.judge(*self.embedding_(self.estimator_, X), nowhere)

    def _accepts_by_group(self) -> bool:
        return self.head_.promise is not None and self.head_.promise.by == "group"

    def _codes(self, X: Any, groups: Any) -> Int[Array, "B"] | None:
        """The given groups as indices into ``groups_``, -1 for others; None where decisions need none."""
        if groups is None:
            if self._accepts_by_group():
                raise ValueError("by='group' has a threshold for each group: pass groups=, the group of every row.")
            return None
        if not self._accepts_by_group():
            raise ValueError("Decisions do not depend on given groups (by='group'); leave out groups=.")
        place = {} if self.groups_ is None else {name: code for code, name in enumerate(self.groups_.tolist())}
        return np.array([place.get(name, -1) for name in row_ids(groups, _num_samples(X), "groups").tolist()])


def _led_by(probabilities: Float[Array, "B C"], label: Int[Array, "B"]) -> Float[Array, "B C"]:
    """Probabilities with the label's as the largest: larger ones are lowered to their mean with the label's.

    With the k largest others the mean is at least as large as all further ones for the k that makes it largest.

    >>> _led_by(np.array([[0.2, 0.5, 0.3], [0.7, 0.2, 0.1]]), np.array([0, 0])).round(3)
    array([[0.35, 0.35, 0.3 ],
           [0.7 , 0.2 , 0.1 ]])
    """
    rows, others = np.arange(len(label)), probabilities.copy()
    others[rows, label] = 0.0
    # The head rounds to float32; the sum of a row is one in float64.
    others *= ((1.0 - probabilities[rows, label]) / np.maximum(others.sum(axis=1), np.finfo(np.float64).tiny))[:, None]
    first = np.column_stack([probabilities[rows, label], -np.sort(-others, axis=1)])
    level = (first.cumsum(axis=1) / np.arange(1, first.shape[1] + 1)).max(axis=1)
    found = np.minimum(others, (level * (1.0 - _LEAD))[:, None])
    found[rows, label] = level
    return found
