"""TrustClassifier: scikit-learn's checks and tools, tables with categories, the labels judged, promises, few rows."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import sklearn
from scipy import sparse
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.compose import make_column_transformer
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.exceptions import NotFittedError
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.svm import SVC

from sepc_torch import TrustClassifier, TrustHead
from sepc_torch.classifier_embedding import ClassifierEmbedding, estimator_logits
from sepc_torch.head.cross_calibration import calibrate_out_of_fold
from sepc_torch.shapes import Array
from sepc_torch.trust_classifier import CalibrationWarning

ROOT = Path(__file__).resolve().parent.parent


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


@pytest.mark.parametrize("method", ["predict", "predict_proba", "decision_function", "judge", "confidence", "accept"])
def test_not_fitted(method: str) -> None:
    with pytest.raises(NotFittedError):
        getattr(TrustClassifier(LogisticRegression()), method)([[0.0]])


def test_labels_and_probabilities_are_those_of_the_estimator(fitted: TrustClassifier) -> None:
    X, _ = clouds(np.random.default_rng(1), 200)
    inner = fitted.estimator_
    np.testing.assert_array_equal(fitted.predict(X), inner.predict(X))
    np.testing.assert_array_equal(fitted.predict_proba(X), inner.predict_proba(X))
    np.testing.assert_array_equal(fitted.decision_function(X), inner.decision_function(X))
    out = fitted.judge(X)
    np.testing.assert_array_equal(fitted.classes_[out.network_label.numpy()], inner.predict(X))
    np.testing.assert_array_equal(fitted.accept(X), out.accept.numpy())
    np.testing.assert_array_equal(fitted.confidence(X), out.confidence.numpy())
    assert not hasattr(fitted, "nothing")


def test_ordinary_rows_are_accepted_and_distant_ones_are_not(fitted: TrustClassifier) -> None:
    X, y = clouds(np.random.default_rng(2), 600)
    accept, right = fitted.accept(X), fitted.predict(X) == y
    assert accept.mean() > 0.85  # promised on average: 0.95
    assert right[accept].mean() > right[~accept].mean()
    assert not fitted.accept(X + 40.0).any()


def test_a_risk_is_kept() -> None:
    model = TrustClassifier(LinearDiscriminantAnalysis(), risk=0.1, delta=0.1).fit(*fixed(600))
    X, y = clouds(np.random.default_rng(3), 1500)
    accept = model.accept(X)
    assert model.acceptance_ is not None
    assert model.acceptance_.found
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


class Weighted(ClassifierMixin, BaseEstimator):  # type: ignore[misc] # scikit-learn ships no types
    """A classifier without scores that keeps the weights it was fitted with."""

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Weighted:
        self.classes_ = np.unique(y)
        self.weights_, self.rows_ = sample_weight, np.asarray(X)
        self.model_ = LinearDiscriminantAnalysis().fit(X, y)
        return self

    def predict(self, X: Any) -> Array:
        return self.model_.predict(X)


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
        assert not hasattr(model, "predict_proba")


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


def test_missing_values_without_a_pipeline() -> None:
    X, y = fixed(200)
    X[::7, 1] = np.nan
    model = TrustClassifier(HistGradientBoostingClassifier(max_iter=5)).fit(X, y)
    X[1, 0] = np.nan  # missing in a feature that was complete
    assert np.isfinite(model.confidence(X)).all()


def test_wide_sparse_features_are_projected() -> None:
    rng = np.random.default_rng(0)
    y = np.arange(200) % 2
    words = sparse.csr_matrix((rng.random((200, 600)) < 0.02 + 0.1 * (np.arange(600) % 2 == y[:, None])).astype(float))
    model = TrustClassifier(LogisticRegression()).fit(words, y)
    assert model.head_.in_features == 64
    assert model.accept(words).mean() > 0.7


def test_text_needs_a_transformer() -> None:
    table = pd.DataFrame({"job": np.where(np.arange(100) % 2, "a", "b")})
    model = TrustClassifier(HistGradientBoostingClassifier(categorical_features=["job"], max_iter=2))
    with pytest.raises(ValueError, match="ColumnTransformer"):
        model.fit(table.astype("category"), np.arange(100) % 2)


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


def test_a_search_over_parameters() -> None:
    X, y = fixed(240)
    search = GridSearchCV(
        TrustClassifier(LogisticRegression(), flag_rate=0.1), {"estimator__C": [1e-6, 1.0]}, cv=2
    ).fit(X, y)
    assert search.best_params_ == {"estimator__C": 1.0}
    inside = TrustClassifier(GridSearchCV(make_pipeline(StandardScaler(), LogisticRegression()), {}, cv=2)).fit(X, y)
    assert inside.head_.in_features == 3


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


def test_points_are_kept_for_updates() -> None:
    X, y = fixed(90)
    model = TrustClassifier(LogisticRegression(), flag_rate=0.1, keep_points=True).fit(X, y)
    assert model.head_.training_set is not None
    before = len(model.head_.training_set)
    model.head_.update(model.embedding_.embed(model.estimator_, X[:5]), y[:5])
    assert len(model.head_.training_set) == before + 5


def test_a_class_in_the_calibration_part_only_is_fitted() -> None:
    X, y = fixed(200, 2)
    y[np.random.RandomState(5).permutation(200)[3]] = 7  # the only row of class 7 would be held back
    with pytest.warns(UserWarning, match="Classes with fewer"):
        model = TrustClassifier(LogisticRegression(), random_state=5).fit(X, y)
    assert model.classes_.tolist() == [0, 1, 7]
    assert model.acceptance_ is not None
    assert model.acceptance_.points == round(49 / 2)


def test_folds_calibrate_with_all_rows() -> None:
    X, y = fixed(90)
    model = TrustClassifier(LogisticRegression(), cv=3, flag_rate=0.1).fit(X, y)
    np.testing.assert_array_equal(model.estimator_.coef_, LogisticRegression().fit(X, y).coef_)
    assert model.acceptance_ is not None
    assert model.acceptance_.points == 45
    new, _ = clouds(np.random.default_rng(4), 400)
    assert 0.75 < model.accept(new).mean() < 1.0  # promised approximately: 0.9
    assert not model.accept(new + 40.0).any()
    again = TrustClassifier(LogisticRegression(), cv=StratifiedKFold(3), flag_rate=0.1).fit(X, y)
    np.testing.assert_array_equal(again.judge(new).joint, model.judge(new).joint)


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reject_label": 1}, "reject_label=1 is a label"),
        ({"risk": 2.0}, "risk must lie between 0 and 1"),
        ({"flag_rate": 0.0}, "flag_rate must lie"),
        ({"calibration_size": 1.0}, "calibration_size must lie"),
    ],
)
def test_wrong_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrustClassifier(LogisticRegression(), **options).fit(*fixed(100))


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
