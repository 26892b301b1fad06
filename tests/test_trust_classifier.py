"""TrustClassifier: scikit-learn's checks and tools, tables with categories, the labels judged, promises, few rows."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import sklearn
import torch
from scipy import sparse
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import make_column_transformer
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.exceptions import NotFittedError
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.frozen import FrozenEstimator
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, Ridge, RidgeClassifier
from sklearn.metrics import log_loss
from sklearn.model_selection import FixedThresholdClassifier, GridSearchCV, StratifiedKFold
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.svm import SVC

from sepc_torch import DriftMonitor, TrustClassifier, TrustHead
from sepc_torch.data.table_classifier import OwnEstimator, estimator_labels, estimator_logits
from sepc_torch.data.table_encoding import TableEncoding
from sepc_torch.shapes import Array
from sepc_torch.sklearn.calibration import Fold, calibrate_out_of_fold
from sepc_torch.sklearn.embedding import ClassifierEmbedding, EmbeddingWarning
from sepc_torch.sklearn.trust_classifier import CalibrationWarning

ROOT = Path(__file__).resolve().parent.parent
Rng = np.random.Generator


@pytest.mark.slow
def test_scikit_learn_checks() -> None:
    """In a process of its own: shape checks at every call would make it four times as slow."""
    code = (
        "import warnings; warnings.simplefilter('ignore')\n"  # most checks have too few rows to calibrate with
        "from sklearn.linear_model import LogisticRegression\n"
        "from sklearn.utils.estimator_checks import check_estimator\n"
        "from sepc_torch import TrustClassifier\n"
        "print(len(check_estimator(TrustClassifier(LogisticRegression()), on_skip=None)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50


def clouds(rng: np.random.Generator, rows: int, classes: int = 3) -> tuple[Array, Array]:
    """Overlapping clouds of equal size, a third of which lie apart."""
    y = np.arange(rows) % classes
    return rng.normal(size=(rows, 3)) + 2.0 * np.eye(3)[y % 3], y


def fixed(rows: int, classes: int = 3) -> tuple[Array, Array]:
    return clouds(np.random.default_rng(0), rows, classes)


@pytest.fixture(scope="module")
def fitted() -> TrustClassifier:
    return TrustClassifier(LogisticRegression()).fit(*fixed(400))


@pytest.mark.parametrize("method", ["predict", "predict_proba", "judge", "confidence", "accept"])
def test_not_fitted(method: str) -> None:
    with pytest.raises(NotFittedError):
        getattr(TrustClassifier(LogisticRegression()), method)([[0.0]])


def test_labels_are_those_of_the_estimator(fitted: TrustClassifier) -> None:
    X, _ = clouds(np.random.default_rng(1), 200)
    inner = fitted.estimator_
    np.testing.assert_array_equal(fitted.predict(X), inner.predict(X))
    out = fitted.judge(X)
    np.testing.assert_array_equal(fitted.classes_[out.network_label.numpy()], inner.predict(X))
    np.testing.assert_array_equal(fitted.accept(X), out.accept.numpy())
    np.testing.assert_array_equal(fitted.confidence(X), out.confidence.numpy())
    assert not hasattr(fitted, "nothing")


def test_probabilities_are_calibrated_and_led_by_the_label(fitted: TrustClassifier) -> None:
    """The label has the largest probability in every row: its confidence, unless another class would have more."""
    X, y = clouds(np.random.default_rng(1), 2000)
    found, confidence = fitted.predict_proba(X), fitted.confidence(X)
    label = np.searchsorted(fitted.classes_, fitted.predict(X))
    np.testing.assert_array_equal(found.argmax(axis=1), label)
    np.testing.assert_allclose(found.sum(axis=1), 1.0, rtol=1e-6)
    of_label = found[np.arange(len(X)), label]
    same = of_label == confidence
    assert same.mean() > 0.9
    assert (of_label[~same] > confidence[~same]).all()
    assert log_loss(y, found) < log_loss(y, fitted.estimator_.predict_proba(X)) + 0.05


def test_probabilities_without_those_of_the_estimator() -> None:
    """A ridge classifier has none of its own; with too few rows to calibrate they are the estimator's."""
    model = TrustClassifier(RidgeClassifier()).fit(*fixed(300))
    np.testing.assert_array_equal(
        model.predict_proba(fixed(50)[0]).argmax(axis=1), model.judge(fixed(50)[0]).network_label
    )
    with pytest.warns(CalibrationWarning):
        few = TrustClassifier(LogisticRegression()).fit(*fixed(40))
    np.testing.assert_array_equal(few.predict_proba(fixed(50)[0]), few.estimator_.predict_proba(fixed(50)[0]))


def test_ordinary_rows_are_accepted_and_distant_ones_are_not(fitted: TrustClassifier) -> None:
    X, y = clouds(np.random.default_rng(2), 600)
    accept, right = fitted.accept(X), fitted.predict(X) == y
    assert accept.mean() > 0.85  # promised on average: 0.95
    assert right[accept].mean() > right[~accept].mean()
    assert not fitted.accept(X + 40.0).any()


@pytest.mark.slow
def test_a_risk_is_kept() -> None:
    model = TrustClassifier(LinearDiscriminantAnalysis(), risk=0.1, delta=0.1).fit(*fixed(600))
    X, y = clouds(np.random.default_rng(3), 1500)
    accept = model.accept(X)
    assert model.acceptance_ is not None
    assert model.acceptance_.found  # type: ignore[union-attr]
    assert 0.3 < accept.mean() < 0.99
    assert (model.predict(X) != y)[accept].mean() <= 0.1
    assert (model.predict(X) != y).mean() > 0.12


@pytest.mark.parametrize(
    "estimator",
    [
        LogisticRegression(),
        RandomForestClassifier(4, random_state=0),  # probabilities with ties and zeros
        KNeighborsClassifier(2),
        SVC(decision_function_shape="ovo"),  # four classes have six scores
        SVC(),  # labels need not have the largest score
        RidgeClassifier(),
    ],
    ids=lambda estimator: type(estimator).__name__,
)
@pytest.mark.parametrize("classes", [2, 4])
def test_logits_belong_to_the_labels(rng: np.random.Generator, estimator: Any, classes: int) -> None:
    X, y = clouds(rng, 120, classes)
    names = np.array(["b", "a", "d", "c"])[y]
    model = clone(estimator).fit(X, names)
    logits = estimator_logits(model, X)
    assert logits.shape == (120, classes)
    np.testing.assert_array_equal(model.classes_[logits.argmax(axis=1)], model.predict(X))
    largest = np.sort(logits.astype(np.float32), axis=1)
    assert (largest[:, -1] > largest[:, -2]).all()


class Columns:
    """A classifier that gives labels and log odds as columns, as some libraries do."""

    def __init__(self, estimator: Any) -> None:
        self.estimator, self.classes_ = estimator, estimator.classes_

    def predict(self, X: Any) -> Any:
        return self.estimator.predict(X)[:, None]

    def decision_function(self, X: Any) -> Any:
        odds = self.estimator.decision_function(X)
        return odds.reshape(len(odds), -1)


@pytest.mark.parametrize("classes", [2, 4])
def test_labels_and_log_odds_as_columns(rng: np.random.Generator, classes: int) -> None:
    X, y = clouds(rng, 120, classes)
    plain = LogisticRegression().fit(X, y)
    columns = Columns(plain)
    np.testing.assert_array_equal(estimator_labels(columns, X), plain.predict(X))
    np.testing.assert_array_equal(estimator_logits(columns, X), estimator_logits(plain, X))
    names = [f"x{j}" for j in range(X.shape[1])]
    encoding = TableEncoding.fit(dict(zip(names, X.T, strict=True)), names, [])
    np.testing.assert_array_equal(OwnEstimator(columns).logits(X, encoding), OwnEstimator(plain).logits(X, encoding))


class Weighted(ClassifierMixin, BaseEstimator):  # type: ignore[misc] # scikit-learn ships no types
    """A classifier without scores that keeps the weights it was fitted with."""

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Weighted:
        self.classes_ = np.unique(y)
        self.weights_, self.rows_ = sample_weight, np.asarray(X)
        self.model_ = LinearDiscriminantAnalysis().fit(X, y)
        return self

    def predict(self, X: Any) -> Array:
        return self.model_.predict(X)


@pytest.mark.slow
def test_weights_reach_the_estimator_with_their_rows() -> None:
    X, y = fixed(200)
    weights = X[:, 0] ** 2
    plain = TrustClassifier(Weighted()).fit(X, y, sample_weight=weights)
    with sklearn.config_context(enable_metadata_routing=True):
        asked = TrustClassifier(Weighted().set_fit_request(sample_weight=True)).fit(X, y, sample_weight=weights)
        with pytest.raises(sklearn.exceptions.UnsetMetadataPassedError):
            TrustClassifier(Weighted()).fit(X, y, sample_weight=weights)
        search = GridSearchCV(asked, {"flag_rate": [0.1]}, cv=2).fit(X, y, sample_weight=weights)
    for model in (plain, asked, search.best_estimator_):
        np.testing.assert_array_equal(model.estimator_.weights_, model.estimator_.rows_[:, 0] ** 2)
        assert len(model.estimator_.weights_) == 150
        np.testing.assert_allclose(model.predict_proba(X).sum(axis=1), 1.0)


@pytest.mark.slow
def test_groups_reach_the_classifier_with_their_rows() -> None:
    X, y = fixed(900)
    model = TrustClassifier(LinearDiscriminantAnalysis(), risk=0.5, by="group")
    with sklearn.config_context(enable_metadata_routing=True):
        model.set_fit_request(groups=True)
        search = GridSearchCV(model, {}, cv=2).fit(X, y, groups=(X[:, 0] > 1.0).astype(int))
    table, labels = search.best_estimator_.acceptance_, search.best_estimator_.head_.calibration.network
    assert [row.group for row in table.groups] == [(0,), (1,)]
    assert sum(row.points for row in table.groups) == len(labels.ranked_rows)
    assert 0.2 < table.groups[1].points / len(labels.ranked_rows) < 0.5


def mixed_table(rng: np.random.Generator, rows: int) -> tuple[pd.DataFrame, Array]:
    """Two numbers, a category, missing values in all of them."""
    y = np.where(rng.random(rows) < 0.5, "yes", "no")
    table = pd.DataFrame(
        {
            "age": rng.normal(size=rows) + 2.0 * (y == "yes"),
            "income": 1000.0 * rng.exponential(size=rows),
            "job": np.where(rng.random(rows) < 0.8, np.where(y == "yes", "clerk", "nurse"), "none"),
        }
    )
    for j in range(3):
        table.iloc[rng.integers(rows, size=5), j] = np.nan
    return table, y


@pytest.mark.slow
@pytest.mark.parametrize("sparse_output", [False, True])
def test_tables_with_categories_and_missing_values(sparse_output: bool) -> None:
    table, y = mixed_table(np.random.default_rng(0), 400)
    columns = make_column_transformer(
        (make_pipeline(SimpleImputer(), StandardScaler()), ["age", "income"]),
        (OneHotEncoder(handle_unknown="ignore", sparse_output=sparse_output), ["job"]),
        sparse_threshold=1.0 if sparse_output else 0.0,
    )
    model = TrustClassifier(make_pipeline(columns, LogisticRegression()), reject_label="ask").fit(table, y)
    assert model.feature_names_in_.tolist() == list(table.columns)
    new, truth = mixed_table(np.random.default_rng(1), 300)
    label, accept = model.predict(new), model.accept(new)
    assert (label[~accept] == "ask").all()
    assert (label[accept] == truth[accept]).mean() > 0.8
    far = new.assign(age=1e3)
    assert (model.predict(far) == "ask").all()
    with pytest.raises(ValueError, match="feature names should match"):
        model.judge(new[["income", "age", "job"]])


@pytest.mark.slow
def test_missing_values_without_a_pipeline() -> None:
    X, y = fixed(200)
    X[::7, 1] = np.nan
    model = TrustClassifier(HistGradientBoostingClassifier(max_iter=5)).fit(X, y)
    X[1, 0] = np.nan  # missing in a feature that was complete
    assert np.isfinite(model.confidence(X)).all()


@pytest.mark.slow
def test_wide_sparse_features_are_projected() -> None:
    rng = np.random.default_rng(0)
    y = np.arange(200) % 2
    words = sparse.csr_matrix((rng.random((200, 600)) < 0.02 + 0.1 * (np.arange(600) % 2 == y[:, None])).astype(float))
    model = TrustClassifier(LogisticRegression()).fit(words, y)
    assert model.head_.in_features == 64
    assert model.accept(words).mean() > 0.7


def native_table(rng: np.random.Generator, rows: int) -> tuple[pd.DataFrame, Array]:
    """A table with categories, codes that are categories, flags and gaps."""
    table, y = mixed_table(rng, rows)
    codes = pd.Categorical(1000 * rng.integers(4, size=rows))
    return table.assign(job=table["job"].astype("category"), area=codes, member=rng.random(rows) < 0.5), y


def native_boosting() -> HistGradientBoostingClassifier:
    return HistGradientBoostingClassifier(categorical_features="from_dtype", max_iter=5)


def test_native_categories_are_encoded() -> None:
    """Codes that are categories are no numbers; the head takes tables, and explanations speak in columns."""
    table, y = native_table(np.random.default_rng(0), 400)
    model = TrustClassifier(native_boosting(), risk=0.15).fit(table, y)
    names = model.head_.feature_names
    assert names is not None
    assert {"age", "age is missing", "job=clerk", "area=3000", "member"} <= set(names)
    assert not {"area", "job"} & set(names)
    gaps = table.assign(empty=np.nan, texts=pd.array([None, *["a"] * 399], dtype="string"))
    found = ClassifierEmbedding.fit(None, model.estimator_, gaps).features.feature_names
    assert {"age", "texts=a", "texts=(other)"} <= set(found)
    assert not any("empty" in name for name in found)  # a column without a value is left out
    new, truth = native_table(np.random.default_rng(1), 300)
    accept = model.accept(new)
    assert accept.mean() > 0.3
    assert (model.predict(new)[accept] == truth[accept]).mean() > 0.8
    assert not TrustClassifier(native_boosting(), flag_rate=0.1).fit(table, y).accept(new.assign(age=1e3)).any()
    logits = estimator_logits(model.estimator_, new)
    np.testing.assert_array_equal(model.head_.judge(new, logits).joint, model.judge(new).joint)
    unseen = new.assign(job=pd.Categorical(["pilot"] * len(new)))
    assert np.isfinite(model.confidence(unseen)).all()
    assert {item.name for item in model.explain(new[:1])[0].features} <= set(new.columns)


@pytest.mark.slow
def test_light_gradient_boosting_on_a_table() -> None:
    lightgbm = pytest.importorskip("lightgbm")
    table, y = native_table(np.random.default_rng(0), 400)
    model = TrustClassifier(lightgbm.LGBMClassifier(n_estimators=5, verbose=-1), flag_rate=0.1).fit(table, y)
    assert "job=clerk" in (model.head_.feature_names or ())
    assert model.accept(table).mean() > 0.7


class ColumnOfLabels(ClassifierMixin, BaseEstimator):  # type: ignore[misc] # scikit-learn ships no types
    """A classifier of tables with text whose labels come as a column, as those of some boosting libraries do."""

    def fit(self, X: Any, y: Any) -> ColumnOfLabels:
        self.classes_ = np.unique(y)
        self.clerk_ = y[np.flatnonzero(X["job"].to_numpy() == "clerk")[0]]
        return self

    def predict_proba(self, X: Any) -> Array:
        clerk = (X["job"].to_numpy() == "clerk")[:, None] == (self.classes_ == self.clerk_)
        return np.where(clerk, 0.8, 0.2)

    def predict(self, X: Any) -> Array:
        return self.classes_[self.predict_proba(X).argmax(axis=1)][:, None]


@pytest.mark.filterwarnings("ignore:A column-vector y was passed")
def test_labels_that_come_as_a_column() -> None:
    table, y = mixed_table(np.random.default_rng(0), 300)
    model = TrustClassifier(ColumnOfLabels(), flag_rate=0.2).fit(table, y)
    assert model.predict(table).shape == (300,)
    np.testing.assert_array_equal(model.judge(table).network_label, model.predict(table) == model.classes_[1])
    assert model.accept(table).mean() > 0.5


def wrapped(kind: str, table: pd.DataFrame, y: Array) -> Any:
    """A pipeline over a table inside other estimators."""
    columns = make_column_transformer(
        (make_pipeline(SimpleImputer(), StandardScaler()), ["age", "income"]),
        (OneHotEncoder(handle_unknown="ignore", sparse_output=False), ["job"]),
    )
    pipeline = make_pipeline(columns, LogisticRegression())
    return {
        "frozen": lambda: FrozenEstimator(pipeline.fit(table, y)),
        "calibrated": lambda: CalibratedClassifierCV(pipeline, cv=2),
        "calibrated, frozen": lambda: CalibratedClassifierCV(FrozenEstimator(pipeline.fit(table, y))),
        "nested": lambda: make_pipeline(columns, make_pipeline(StandardScaler(), LogisticRegression())),
        "searched": lambda: GridSearchCV(pipeline, {}, cv=2),
        "threshold": lambda: FixedThresholdClassifier(pipeline, threshold=0.4),
    }[kind]()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["frozen", "calibrated", "calibrated, frozen", "nested", "searched", "threshold"])
def test_features_inside_other_estimators(kind: str) -> None:
    """The head sees what the inner classifier sees, and the labels are those of the whole."""
    table, y = mixed_table(np.random.default_rng(0), 400)
    estimator = wrapped(kind, *mixed_table(np.random.default_rng(2), 300))
    model = TrustClassifier(estimator, flag_rate=0.1).fit(table, y)
    assert model.embedding_.loss is None
    assert model.head_.in_features == 2 + table["job"].nunique(dropna=False)
    new, truth = mixed_table(np.random.default_rng(1), 300)
    accept = model.accept(new)
    np.testing.assert_array_equal(model.predict(new), model.estimator_.predict(new))
    assert 0.7 < accept.mean() < 1.0
    assert (model.predict(new)[accept] == truth[accept]).mean() > 0.8
    assert not model.accept(new.assign(age=1e4)).any()


class OfWords(ClassifierMixin, BaseEstimator):  # type: ignore[misc] # scikit-learn ships no types
    """A classifier of texts: as sure as the weights of the places of one letter."""

    def fit(self, X: Any, y: Any) -> OfWords:
        self.classes_ = np.unique(y)
        return self

    def predict_proba(self, X: Any) -> Array:
        weights = np.sqrt(np.arange(1.0, 31.0))
        share = np.array([[letter == "b" for letter in text] for text in X]) @ weights / weights.sum()
        right = 1.0 / (1.0 + np.exp(-12.0 * (share - 0.5)))
        return np.stack([1.0 - right, right], axis=1)

    def predict(self, X: Any) -> Array:
        return self.classes_[self.predict_proba(X).argmax(axis=1)]


def test_log_probabilities_in_place_of_features() -> None:
    """One warning says what is lost, and so does the embedding; promises hold as with features."""
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(["a", "b"], size=30)) for _ in range(600)]
    y = OfWords().fit(words, [False, True]).predict(words) ^ (rng.random(600) < 0.05)
    with pytest.warns(EmbeddingWarning, match=r"features \(list\).*log probabilities.*unknown kind.*embed=") as caught:
        model = TrustClassifier(OfWords(), risk=0.2, delta=0.2).fit(words[:400], y[:400])
    assert [model.embedding_.loss] == [str(warning.message) for warning in caught]
    assert model.embedding_.embed(model.estimator_, ["b" * 30]).max() <= 0.0
    assert model.head_.in_features == 2
    accept = model.accept(words[400:])
    assert accept.mean() > 0.5
    assert (model.predict(words[400:]) != y[400:])[accept].mean() < 0.2
    letters = TrustClassifier(OfWords(), embed=lambda _, X: np.array([[letter == "b" for letter in w] for w in X]))
    assert letters.fit(words, y).embedding_.loss is None


def test_neither_features_nor_probabilities() -> None:
    class Plain(ClassifierMixin, BaseEstimator):  # type: ignore[misc] # scikit-learn ships no types
        def fit(self, X: Any, y: Any) -> Plain:
            self.classes_ = np.unique(y)
            return self

        def predict(self, X: Any) -> Array:
            return self.classes_[[len(text) % 2 for text in X]]

    with pytest.raises(ValueError, match=r"\(list\) are neither numbers nor columns .* no probabilities. Pass embed="):
        TrustClassifier(Plain()).fit(["ab", "bbbb"] * 50, [False, True] * 50)


@pytest.mark.slow
def test_embeddings_of_a_step_or_a_callable() -> None:
    X, y = fixed(200)
    pipeline = make_pipeline(StandardScaler(), LinearDiscriminantAnalysis())
    step = TrustClassifier(pipeline, embed="standardscaler").fit(X, y)
    np.testing.assert_allclose(step.embedding_.embed(step.estimator_, X), step.estimator_[0].transform(X))

    def project(estimator: Any, rows: Any) -> Array:
        return estimator[-1].transform(estimator[0].transform(rows))

    by_function = TrustClassifier(pipeline, embed=project).fit(X, y)
    assert by_function.head_.in_features == 2
    assert by_function.judge(X).accept.double().mean() > 0.7
    with pytest.raises(ValueError, match="the pipeline has standardscaler"):
        TrustClassifier(pipeline, embed="pca").fit(X, y)
    with pytest.raises(ValueError, match="no Pipeline"):
        TrustClassifier(LogisticRegression(), embed="pca").fit(X, y)
    with pytest.raises(ValueError, match=r"got \(150,\)"):
        TrustClassifier(pipeline, embed=lambda _, rows: rows[:, 0]).fit(X, y)


@pytest.mark.slow
def test_a_search_over_parameters() -> None:
    X, y = fixed(240)
    search = GridSearchCV(
        TrustClassifier(LogisticRegression(), flag_rate=0.1), {"estimator__C": [1e-6, 1.0]}, cv=2
    ).fit(X, y)
    assert search.best_params_ == {"estimator__C": 1.0}
    inside = TrustClassifier(GridSearchCV(make_pipeline(StandardScaler(), LogisticRegression()), {}, cv=2)).fit(X, y)
    assert inside.head_.in_features == 3


@pytest.mark.slow
def test_few_rows_are_not_calibrated() -> None:
    X, y = fixed(60, 2)
    with pytest.warns(CalibrationWarning, match="leaves 15 of 60, about 20 rows too few"):
        model = TrustClassifier(LogisticRegression(), reject_label=-1).fit(X, y)
    assert model.acceptance_ is None
    assert (model.predict(X) == -1).all()
    np.testing.assert_array_equal(model.estimator_.coef_, LogisticRegression().fit(X, y).coef_)  # fitted to all rows
    with pytest.warns(CalibrationWarning, match="for flag_rate=0.05; about 16 more rows of X are needed"):
        TrustClassifier(LogisticRegression(), calibration_size=0.5).fit(X, y)
    with pytest.warns(CalibrationWarning, match=r"cannot promise a risk of 0\.01: .* more rows of X are needed"):
        model = TrustClassifier(LogisticRegression(), calibration_size=0.5, risk=0.01).fit(X, y)
    assert not model.accept(X).any()


def test_all_rows_train_if_others_calibrate() -> None:
    """Explanations name rows of the X of fit; the promise is exact, and errors speak of the calibration rows."""
    X, y = fixed(200)
    held, truth = clouds(np.random.default_rng(5), 300)
    model = TrustClassifier(LogisticRegression(), risk=0.2, random_state=3)
    model.fit(X, y, X_calibration=held, y_calibration=truth)
    np.testing.assert_array_equal(model.estimator_.coef_, LogisticRegression().fit(X, y).coef_)
    assert model.head_.promise is not None
    assert model.head_.promise.exact
    assert model.head_.calibration is not None
    labels = model.head_.calibration.network
    assert torch.equal(labels.ranked_rows, 200 + torch.arange(300))  # the training rows fit the scores, out of fold
    assert torch.equal(labels.point_class[200:], torch.from_numpy(truth))
    for row, found in enumerate(model.explain(X[:20])):
        assert all(y[example.id] == example.label for example in found.examples)
        assert row in [example.id for example in (*found.examples, *found.runner_up_examples)]
    with pytest.warns(CalibrationWarning, match="X_calibration has 12 rows; 20 calibration rows"):
        few = model.fit(X, y, X_calibration=held[:12], y_calibration=truth[:12])
    assert few.acceptance_ is None
    with pytest.warns(CalibrationWarning, match="more rows of X_calibration are needed"):
        model.set_params(risk=None, flag_rate=0.001).fit(X, y, X_calibration=held, y_calibration=truth)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"X_calibration": fixed(50)[0]}, "pass both"),
        ({"X_calibration": fixed(50)[0], "y_calibration": [0, 1]}, "inconsistent numbers of samples"),
        ({"X_calibration": fixed(50)[0], "y_calibration": ["x"] * 50}, "holds the labels 'x', which y does not"),
        ({"X_calibration": fixed(50)[0][:, :2], "y_calibration": fixed(50)[1]}, "X has 2 features"),
        ({"groups": np.zeros(100, dtype=int)}, "leave them out, or set by="),
    ],
)
def test_wrong_rows(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrustClassifier(LogisticRegression()).fit(*fixed(100), **given)


def test_folds_and_calibration_rows_exclude_each_other() -> None:
    held, truth = fixed(50)
    with pytest.raises(ValueError, match="leave out cv, or X_calibration"):
        TrustClassifier(LogisticRegression(), cv=3).fit(*fixed(100), X_calibration=held, y_calibration=truth)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The risk 0.2 cannot be promised in")  # in the smallest regions
@pytest.mark.parametrize("by", ["predicted", "region", "class"])
@pytest.mark.parametrize("cv", [None, 2])
def test_promises_by_group(by: str, cv: int | None) -> None:
    """The promise is that of the head: the same request to the head gives the same thresholds."""
    X, y = clouds(np.random.default_rng(8), 800)
    settings = {"risk": 0.2, "delta": 0.1, "by": by, "cv": cv, "calibration_size": 0.7}
    model = TrustClassifier(LinearDiscriminantAnalysis(), **settings).fit(X, y)
    new, truth = clouds(np.random.default_rng(9), 2000)
    accept, given = model.accept(new), model.acceptance_
    assert given is not None
    assert 0.3 < accept.mean() < 1.0
    found, keys = model.judge(new), {"predicted": model.predict(new), "region": None, "class": truth}[by]
    keys = found.nearest.numpy() if keys is None else keys
    for group in given.groups:  # type: ignore[union-attr]
        mine = accept & np.isin(keys, group.group)
        noise = 3.0 * math.sqrt(0.16 / max(mine.sum(), 1))
        assert not mine.any() or (model.predict(new)[mine] != truth[mine]).mean() <= 0.2 + noise
    again = model.head_.accept_at(risk=0.2, delta=0.1, by=by)
    assert again == given
    assert model.head_.promise is not None
    assert model.head_.promise.by == by
    assert model.head_.promise.exact is (cv is None)


def hard_and_easy(rng: np.random.Generator, rows: int) -> tuple[Array, Array, Array]:
    """Rows of two places; in one of them two in five labels are random, and nothing in the features tells which."""
    X, y = clouds(rng, rows)
    place = np.where(rng.random(rows) < 0.5, "easy", "hard")
    noise = (place == "hard") & (rng.random(rows) < 0.4)
    return X + 2.0 * np.eye(3)[np.arange(rows) % 3], np.where(noise, rng.integers(3, size=rows), y), place


@pytest.mark.slow
@pytest.mark.parametrize("how", ["part", "folds", "rows"])
def test_promises_in_given_groups(how: str) -> None:
    """The group of a row decides, however the calibration rows came about; unseen groups are refused."""
    rng = np.random.default_rng(10)
    X, y, place = hard_and_easy(rng, 500)
    settings = {"cv": 2 if how == "folds" else None, "calibration_size": 0.7}
    model = TrustClassifier(LinearDiscriminantAnalysis(), risk=0.15, by="group", reject_label=-1, **settings)
    rows: dict[str, Any] = {"groups": place}
    if how == "rows":
        held, truth, of_held = hard_and_easy(rng, 400)
        rows = {"X_calibration": held, "y_calibration": truth, "groups": of_held}
    with pytest.warns(CalibrationWarning, match="cannot be promised in 1 of 2 groups"):
        model.fit(X, y, **rows)
    assert model.groups_ is not None
    assert model.groups_.tolist() == ["easy", "hard"]
    new, _, there = hard_and_easy(rng, 1000)
    accept = model.accept(new, groups=there)
    assert accept[there == "easy"].mean() > 0.6
    assert not accept[there == "hard"].any()
    assert not model.accept(new, groups=["elsewhere"] * 1000).any()
    assert (model.predict(new, groups=there)[~accept] == -1).all()
    assert [item.accepted for item in model.explain(new[:20], groups=there[:20])] == accept[:20].tolist()
    confidence = model.confidence(new)
    np.testing.assert_array_equal(confidence, model.judge(new, groups=there).confidence)
    assert model.predict_proba(new).shape == (1000, 3)
    with pytest.raises(ValueError, match="pass groups=, the group of every row"):
        model.accept(new)
    with pytest.raises(ValueError, match="Got 2 groups for 1000 rows"):
        model.accept(new, groups=["easy", "hard"])


def test_groups_that_are_not_known_of_new_rows() -> None:
    """One threshold keeps the risk in all of them, so that none is accepted at the average risk alone."""
    rng = np.random.default_rng(11)
    (X, y, _), (held, truth, place) = hard_and_easy(rng, 150), hard_and_easy(rng, 800)
    rows = {"X_calibration": held, "y_calibration": truth}
    everywhere = TrustClassifier(LinearDiscriminantAnalysis(), risk=0.25).fit(X, y, **rows)
    each = TrustClassifier(LinearDiscriminantAnalysis(), risk=0.25, by="environment")
    with pytest.warns(CalibrationWarning, match="cannot be promised in 2 of 2 groups"):
        each.fit(X, y, **rows, groups=place)
    assert everywhere.accept(X).mean() > 0.5
    assert not each.accept(X).any()
    with pytest.raises(ValueError, match="do not depend on given groups"):
        each.accept(X, groups=place)
    with pytest.raises(ValueError, match="by='environment' needs the group of every row"):
        each.fit(X, y)


def test_thresholds_of_least_cost() -> None:
    """A matrix is in the order of the sorted labels; the bound holds for new rows."""
    rng = np.random.default_rng(12)
    (X, y), (held, truth) = clouds(rng, 150), clouds(rng, 900)
    names = np.array(["c", "a", "b"])
    costs = np.array([[0.0, 1.0, 1.0], [9.0, 0.0, 9.0], [1.0, 1.0, 0.0]])  # a true b that is missed costs nine
    model = TrustClassifier(LinearDiscriminantAnalysis(), costs=costs, review=0.5, delta=0.1)
    model.fit(X, names[y], X_calibration=held, y_calibration=names[truth])
    new, truth = clouds(rng, 4000)
    accept, label = model.accept(new), np.searchsorted(model.classes_, model.predict(new))
    paid = np.where(accept, costs[np.searchsorted(model.classes_, names[truth]), label], 0.5)
    assert model.acceptance_ is not None
    assert 0.2 < accept.mean() < 1.0
    assert paid.mean() <= model.acceptance_.bound  # type: ignore[union-attr]
    assert paid.mean() < 0.5
    assert str(model.head_.promise).startswith("the expected cost of a row is at most")


@pytest.mark.slow
def test_a_risk_on_average_accepts_more() -> None:
    X, y = fixed(400)
    strict, average = (
        TrustClassifier(LinearDiscriminantAnalysis(), risk=0.15, average=average).fit(X, y) for average in (False, True)
    )
    new, _ = clouds(np.random.default_rng(13), 1000)
    assert strict.accept(new).mean() < average.accept(new).mean()
    assert str(average.head_.promise) == "on average at most 15 % of the accepted labels are wrong"


def test_the_score_at_a_risk_is_the_largest_accepted_share(fitted: TrustClassifier) -> None:
    """Counted with a loop; a classifier that separates better scores higher; equal scores are accepted together."""
    X, y = clouds(np.random.default_rng(14), 500)
    joint, right = fitted.judge(X).joint.numpy(), fitted.predict(X) == y
    shares = [(joint >= t).mean() for t in joint if (~right)[joint >= t].mean() <= 0.1]
    assert fitted.score_at_risk(X, y, risk=0.1) == pytest.approx(max(shares))
    assert fitted.score_at_risk(X, y, risk=0.05) < fitted.score_at_risk(X, y, risk=0.2) <= 1.0
    with pytest.raises(ValueError, match="promises no risk; pass risk="):
        fitted.score_at_risk(X, y)
    with pytest.raises(ValueError, match="risk must lie"):
        fitted.score_at_risk(X, y, risk=1.5)
    with pytest.warns(CalibrationWarning):
        few = TrustClassifier(LogisticRegression(), risk=0.1).fit(*fixed(40))
    assert 0.0 < few.score_at_risk(X, y) <= 1.0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The head accepts nothing")  # with the worse parameter
def test_a_search_for_what_accepts_most() -> None:
    X, y = fixed(400)
    model = TrustClassifier(LogisticRegression(), risk=0.15, score_folds=0)
    grid = {"estimator__C": [1e-6, 1.0]}
    for scoring in (TrustClassifier.score_at_risk, partial(TrustClassifier.score_at_risk, risk=0.15)):
        search = GridSearchCV(model, grid, cv=2, scoring=scoring).fit(X, y)
        assert search.best_params_ == {"estimator__C": 1.0}
        assert 0.3 < search.best_score_ <= 1.0
    held, truth = clouds(np.random.default_rng(15), 300)
    search.fit(X, y, X_calibration=held, y_calibration=truth)
    assert len(search.best_estimator_.head_.calibration.network.point_label) == 300


def test_points_are_kept_for_updates() -> None:
    X, y = fixed(90)
    model = TrustClassifier(LogisticRegression(), flag_rate=0.1, keep_points=True).fit(X, y)
    assert model.head_.training_set is not None
    before = len(model.head_.training_set)
    model.head_.update(model.embedding_.embed(model.estimator_, X[:5]), y[:5])
    assert len(model.head_.training_set) == before + 5


@pytest.mark.slow
def test_a_class_in_the_calibration_part_only_is_fitted() -> None:
    X, y = fixed(200, 2)
    y[np.random.RandomState(5).permutation(200)[3]] = 7  # the only row of class 7 would be held back
    with pytest.warns(UserWarning, match="Classes with fewer"):
        model = TrustClassifier(LogisticRegression(), random_state=5).fit(X, y)
    assert model.classes_.tolist() == [0, 1, 7]
    assert model.acceptance_ is not None
    assert model.acceptance_.points == round(49 / 2)


@pytest.mark.slow
def test_folds_calibrate_with_all_rows() -> None:
    X, y = fixed(90)
    model = TrustClassifier(LogisticRegression(), cv=3, flag_rate=0.1).fit(X, y)
    np.testing.assert_array_equal(model.estimator_.coef_, LogisticRegression().fit(X, y).coef_)
    assert model.acceptance_ is not None
    assert model.acceptance_.points == 50  # at least forty fit
    new, _ = clouds(np.random.default_rng(4), 400)
    assert 0.75 < model.accept(new).mean() < 1.0  # promised approximately: 0.9
    assert not model.accept(new + 40.0).any()
    again = TrustClassifier(LogisticRegression(), cv=StratifiedKFold(3), flag_rate=0.1).fit(X, y)
    np.testing.assert_array_equal(again.judge(new).joint, model.judge(new).joint)


def rare(rng: np.random.Generator, rows: int) -> tuple[Array, Array]:
    """Two overlapping classes, nine to one."""
    y = (rng.random(rows) < 0.1).astype(int)
    return rng.standard_normal((rows, 4)) + 1.5 * y[:, None], y


@pytest.mark.slow
def test_folds_keep_predicted_labels_and_regions() -> None:
    """Groups by predicted class are those of the labels that the classifiers gave, regions those of the final head."""
    rng = np.random.default_rng(5)
    X, y = rare(rng, 600)
    model = TrustClassifier(LogisticRegression(class_weight="balanced"), cv=3).fit(X, y)
    labels = model.head_.calibration.network  # type: ignore[union-attr]
    wrong = labels.point_label != labels.point_class
    assert 0.05 < float(wrong.double().mean()) < 0.4
    assert torch.equal(~wrong[labels.ranked_rows], labels.ranked_right)
    out = model.judge(X)
    folds = np.concatenate([left_out for _, left_out in StratifiedKFold(3).split(X, y)])
    assert torch.equal(labels.point_region, out.nearest[torch.from_numpy(folds)])


@pytest.mark.slow
def test_folds_keep_the_risk_of_predicted_classes() -> None:
    """An estimate, which more training rows of the final model make cautious: broken in few fits, not in most."""
    rng, risk, broken = np.random.default_rng(6), 0.2, 0
    X, y = rare(rng, 8000)
    for seed in range(12):
        model = TrustClassifier(LogisticRegression(class_weight="balanced"), cv=3, random_state=seed)
        model.fit(*rare(rng, 1500))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            table = model.head_.accept_at(risk=risk, delta=0.05, by="predicted")
        out = model.judge(X)
        for row in table.groups:
            mine = out.accept.numpy() & np.isin(out.network_label.numpy(), row.group)
            broken += bool(mine.any()) and (y[mine] != out.network_label.numpy()[mine]).mean() > risk
    assert broken <= 2


@pytest.mark.slow
def test_promises_are_exact_if_folds_of_the_training_rows_fit_the_scores() -> None:
    """Over 100 draws of calibration rows: p-values of new rows, and a risk that must hold in four of five draws."""
    rng, risk, delta, draws = np.random.default_rng(8), 0.2, 0.2, 100
    (X, y), (new, truth) = clouds(rng, 120), clouds(rng, 1500)

    def network(rows: Array, labels: Array) -> LinearDiscriminantAnalysis:
        return LinearDiscriminantAnalysis().fit(rows, labels)

    def as_seen(head: TrustHead, model: Any, rows: Array, labels: Array) -> Fold:
        z, logits = torch.from_numpy(rows), torch.from_numpy(model.decision_function(rows))
        return Fold(head, z, z, labels, logits)

    folds = []
    for fitted, left_out in StratifiedKFold(3).split(X, y):
        head = TrustHead.fit(X[fitted], y[fitted], normalize=None, progress=False)
        folds.append(as_seen(head, network(X[fitted], y[fitted]), X[left_out], y[left_out]))
    head, model = TrustHead.fit(X, y, normalize=None, progress=False), network(X, y)
    logits = model.decision_function(new)
    wrong = logits.argmax(axis=1) != truth
    small: list[float] = []
    broken = accepted = 0
    for _ in range(draws):
        head.promise = None
        calibrate_out_of_fold(head, folds, as_seen(head, model, *clouds(rng, 120)))
        assert "estimate" not in str(head.promise)
        accepted += head.accept_at(risk=risk, delta=delta).found
        out = head.judge(new, logits)
        small.append(float((out.p_value <= 0.1).double().mean()))
        taken = out.accept.numpy()
        broken += bool(taken.any()) and wrong[taken].mean() > risk
    assert np.mean(small) <= 0.1 + 3.0 * np.std(small) / draws**0.5
    assert broken <= draws * delta + 3.0 * (draws * delta * (1.0 - delta)) ** 0.5
    assert accepted > 0.7 * draws


def test_folds_that_fit_scores() -> None:
    """By default for a risk, not for a flag rate; never if the classifier is not fitted again or a class is small."""
    X, y = fixed(160)
    model = TrustClassifier(LogisticRegression(), risk=0.3, calibration_size=0.5, random_state=1)

    def ranked(points: int, **changes: Any) -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            labels = clone(model).set_params(**changes).fit(X, y).head_.calibration.network
        assert len(labels.point_label) == points
        return len(labels.ranked_rows)

    assert ranked(160) == ranked(160, score_folds=2) == ranked(160, risk=None, score_folds=3) == 80
    assert ranked(80, score_folds=0) == ranked(80, risk=None) == ranked(80, score_folds=50) == 40
    assert ranked(80, estimator=FrozenEstimator(LogisticRegression().fit(X, y))) == 40
    for count, message in ((1, "no rows to fit"), (-1, "at least 0"), (2.5, "must be an integer")):
        with pytest.raises((TypeError, ValueError), match=message):
            clone(model).set_params(score_folds=count).fit(X, y)


@pytest.mark.slow
def test_a_calibration_with_folds_is_called_an_estimate(tmp_path: Path) -> None:
    """Its promises say so, and a drift monitor, whose alarms must be exact, refuses it; also from a file."""
    X, y = fixed(90)
    model = TrustClassifier(LogisticRegression(), cv=3, flag_rate=0.1).fit(X, y)
    model.head_.save(tmp_path / "head")
    for head in (model.head_, TrustHead.load(tmp_path / "head")):
        head.accept_at(flag_rate=0.2)
        assert "an estimate: out-of-fold rows" in str(head.promise)
        with pytest.raises(ValueError, match=r"not exchangeable.*held-out rows"):
            DriftMonitor(head)
        new, labels = clouds(np.random.default_rng(7), 200)
        head.calibrate(model.embedding_.embed(model.estimator_, new), labels)
        assert "estimate" not in str(head.promise)
        DriftMonitor(head)


@pytest.mark.filterwarnings("ignore:The least populated class:UserWarning")
@pytest.mark.filterwarnings("ignore:Classes with fewer than:UserWarning")
def test_folds_without_a_class_are_not_calibrated() -> None:
    X, y = fixed(60)
    y[0] = 7
    with pytest.warns(CalibrationWarning, match="every class needs two rows"):
        assert not TrustClassifier(LogisticRegression(), cv=3).fit(X, y).accept(X).any()
    y[1] = 7
    rows = np.arange(60)
    lacking = [(rows[2:], rows[:2]), (rows[:40], rows[40:])]
    with pytest.warns(CalibrationWarning, match="lacks a class"):
        assert not TrustClassifier(LogisticRegression(), cv=lacking).fit(X, y).accept(X).any()


def test_out_of_fold_calibration_needs_evidence(fitted: TrustClassifier) -> None:
    bare = TrustHead(fitted.head_.projection, fitted.head_.sepc)
    with pytest.raises(RuntimeError, match="no evidence"):
        calibrate_out_of_fold(bare, [])
    with pytest.raises(ValueError, match="0 points are too few"):
        calibrate_out_of_fold(fitted.head_, [])


@pytest.mark.parametrize(
    ("names", "refusal", "kind"),
    [([0, 1], -1, "i"), (["a", "b"], "refer", "U"), ([0, 1], "refer", "O"), (["a", "b"], -1, "O")],
)
def test_the_reject_label_keeps_the_type_of_the_labels(names: list[Any], refusal: Any, kind: str) -> None:
    X, y = fixed(200, 2)
    model = TrustClassifier(LogisticRegression(), reject_label=refusal).fit(X, np.array(names)[y])
    label = model.predict(np.concatenate([X, X + 40.0]))
    assert label.dtype.kind == kind
    assert set(label[200:].tolist()) == {refusal}
    assert set(names) <= set(label.tolist())


@pytest.mark.parametrize("kind", ["uint8", "int8", "uint64"])
@pytest.mark.parametrize("refusal", [-1, 999])
def test_the_reject_label_is_kept_among_short_labels(kind: str, refusal: int) -> None:
    X, y = fixed(200, 2)
    model = TrustClassifier(LogisticRegression(), reject_label=refusal).fit(X, y.astype(kind))
    assert set(model.predict(np.concatenate([X, X + 40.0])).tolist()) == {0, 1, refusal}


def test_texts_are_rows(rng: Rng) -> None:
    """Of a pipeline that begins with a vectoriser, as a list, an array and a Series."""
    words = np.array(["bright", "calm", "dark", "loud"])
    y = rng.integers(0, 2, 400)
    texts = [" ".join(rng.choice(words[:3] if label else words[1:], 6)) for label in y]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EmbeddingWarning)
        model = TrustClassifier(make_pipeline(TfidfVectorizer(), LogisticRegression()), risk=0.3).fit(texts, y)
    expected = model.confidence(texts)
    for rows in (np.array(texts), np.array(texts, dtype=object), pd.Series(texts)):
        np.testing.assert_array_equal(model.confidence(rows), expected)
        assert (model.predict(rows) == y).mean() > 0.8
    with pytest.raises(ValueError, match="Expected 2D array"):
        model.predict(np.zeros(3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reject_label": 1}, "reject_label=1 is a label"),
        ({"risk": 2.0}, "risk must lie between 0 and 1"),
        ({"flag_rate": 0.0}, "flag_rate must lie"),
        ({"calibration_size": 1.0}, "calibration_size must lie"),
        ({"risk": 0.1, "by": "place"}, "by must be"),
        ({"by": "class"}, "pass risk= too"),
        ({"average": True}, "pass risk= too"),
        ({"risk": 0.1, "by": "class", "average": True}, "leave out by="),
        ({"costs": 1.0}, "pass both"),
        ({"costs": 1.0, "review": 0.1, "risk": 0.1}, "not both"),
        ({"costs": np.ones((2, 2)), "review": 0.1}, r"shape \(3, 3\)"),
    ],
)
def test_wrong_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrustClassifier(LogisticRegression(), **options).fit(*fixed(100))


@pytest.mark.slow
def test_copies_give_the_same_answers(fitted: TrustClassifier, tmp_path: Path) -> None:
    X, y = fixed(400)
    for other in (pickle.loads(pickle.dumps(fitted)), clone(fitted).fit(X, y)):
        np.testing.assert_array_equal(other.judge(X).joint, fitted.judge(X).joint)
    fitted.head_.save(tmp_path / "head.safetensors")
    z, logits = ClassifierEmbedding(None, fitted.embedding_.features)(fitted.estimator_, X)
    loaded = TrustHead.load(tmp_path / "head.safetensors").judge(z, logits)
    np.testing.assert_array_equal(loaded.accept, fitted.accept(X))


def test_decisions_are_explained(fitted: TrustClassifier) -> None:
    X, _ = fixed(20)
    X[3] += 100.0
    found, out = fitted.explain(X), fitted.judge(X)
    assert [item.accepted for item in found] == out.accept.tolist()
    assert [item.label for item in found] == fitted.classes_[out.network_label.numpy()].tolist()
    assert "new to the head" in found[3].sentence
    assert "The classifier's label is" in found[3].sentence
    assert all(item.source == "classifier" and "network" not in str(item) for item in found)


@pytest.mark.slow
@pytest.mark.parametrize("cv", [None, 3])
def test_examples_are_named_by_their_row(cv: int | None) -> None:
    X, y = fixed(200)
    model = TrustClassifier(LogisticRegression(), flag_rate=0.2, cv=cv).fit(X, y)
    examples = [(row, example) for row, found in enumerate(model.explain(X)) for example in found.examples]
    assert all(y[example.id] == example.label for _, example in examples)
    same = [(row, example.id) for row, example in examples if example.distance < 1e-6]
    assert len(same) > 50
    assert all(row == name for row, name in same), "a training row is its own nearest example"


def test_a_regressor_is_refused() -> None:
    with pytest.raises(TypeError, match="must be a classifier, got Ridge"):
        TrustClassifier(Ridge()).fit(*fixed(100))
