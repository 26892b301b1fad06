"""The scikit-learn classifier: estimator checks, use with scikit-learn tools, and agreement with the wrapped model."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.decomposition import PCA
from sklearn.exceptions import NotFittedError
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from sepc_torch import SEPC, Rule, partition
from sepc_torch.model.explanation import Explanation
from sepc_torch.model.sepc import Nearest
from sepc_torch.shapes import Array
from sepc_torch.sklearn.estimator import SEPClassifier

ROOT = Path(__file__).resolve().parent.parent


def expected_to_fail(_estimator: SEPClassifier) -> dict[str, str]:
    """Checks of scikit-learn that fail, with the reason."""
    # The check passes without the annotation checks of the tests: see test_the_constructor_stores_any_value.
    return {
        "check_do_not_raise_errors_in_init_or_set_params": "annotations are checked at every call, in the tests only"
    }


@pytest.mark.slow
@parametrize_with_checks(  # type: ignore[untyped-decorator] # scikit-learn ships no types
    [SEPClassifier()],
    expected_failed_checks=expected_to_fail,
)
def test_scikit_learn_checks(estimator: SEPClassifier, check: Callable[[SEPClassifier], None]) -> None:
    check(estimator)


@pytest.mark.parametrize("method", ["predict", "predict_proba", "trust", "explain"])
def test_not_fitted(method: str) -> None:
    with pytest.raises(NotFittedError):
        getattr(SEPClassifier(), method)([[0.0]])


@pytest.mark.slow
def test_the_constructor_stores_any_value() -> None:
    code = (
        "from sklearn.utils.estimator_checks import check_do_not_raise_errors_in_init_or_set_params as check\n"
        "from sepc_torch import SEPClassifier\n"
        "check('SEPClassifier', SEPClassifier())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def iris() -> tuple[pd.DataFrame, pd.Series[Any]]:
    data = load_iris(as_frame=True)
    return data.data, data.target.map(dict(enumerate(data.target_names.tolist())))


@pytest.fixture(scope="module")
def fitted(iris: tuple[pd.DataFrame, pd.Series[Any]]) -> SEPClassifier:
    return SEPClassifier().fit(*iris)


def clouds(rng: np.random.Generator, sizes: tuple[int, ...], dim: int = 3) -> tuple[Array, Array]:
    """Overlapping clouds, one of each size."""
    y = np.repeat(np.arange(len(sizes)), sizes)
    return rng.normal(size=(len(y), dim)) + rng.normal(size=(len(sizes), dim))[y], y


def test_fitted_attributes(iris: tuple[pd.DataFrame, pd.Series[Any]], fitted: SEPClassifier) -> None:
    X, y = iris
    assert fitted.classes_.tolist() == sorted(set(y)) == fitted.partition_.classes.tolist() == fitted.sepc_.classes
    assert fitted.n_features_in_ == 4
    assert fitted.feature_names_in_.tolist() == list(X.columns)
    assert fitted.partition_.feature_names == tuple(X.columns) == fitted.sepc_.feature_names
    assert fitted.partition_ == partition(X, y)
    assert fitted.sepc_.bank.centers.dtype == torch.float64


@pytest.mark.parametrize("nearest", get_args(Nearest))
@pytest.mark.parametrize("sizes", [(40, 30), (30, 20, 25)])
def test_agreement_with_the_model(rng: np.random.Generator, nearest: Nearest, sizes: tuple[int, ...]) -> None:
    X, y = clouds(rng, sizes)
    z = 1.5 * rng.normal(size=(200, 3))
    model = SEPClassifier(max_impure=1, nearest=nearest).fit(X, y)
    own = SEPC.from_partition(partition(X, y, max_impure=1), nearest, dtype=torch.float64)
    out = own(torch.from_numpy(z))
    assert len(set(out.rule.tolist())) > 1
    np.testing.assert_array_equal(model.predict(z), own.predict(z))
    np.testing.assert_array_equal(model.trust(z), out.trust.numpy())


@pytest.mark.parametrize("sizes", [(120, 12), (50, 50), (40, 10, 25)])
def test_probabilities_are_the_posterior(rng: np.random.Generator, sizes: tuple[int, ...]) -> None:
    X, y = clouds(rng, sizes)
    z = rng.normal(size=(300, 3))
    model = SEPClassifier().fit(X, y)
    proba, label = model.predict_proba(z), model.predict(z)
    assert proba.shape == (300, len(sizes))
    assert ((proba >= 0) & (proba <= 1)).all()
    np.testing.assert_allclose(proba.sum(axis=1), 1.0, rtol=1e-12)
    np.testing.assert_allclose(proba[np.arange(300), label], model.trust(z), rtol=1e-12)
    for i in range(0, 300, 60):
        assert model.explain(z, i).details["posterior"] == pytest.approx(dict(enumerate(proba[i])))  # type: ignore[union-attr]
    assert np.isfinite(log_loss(label, proba, labels=model.classes_))


def test_trust_is_low_where_label_and_posterior_disagree(rng: np.random.Generator) -> None:
    """For two classes the trust is at most one half exactly where they disagree (see the Notes of SEPClassifier)."""
    X, y = clouds(rng, (150, 15), dim=2)
    z = rng.normal(size=(500, 2))
    model = SEPClassifier().fit(X, y)
    likeliest = model.classes_[model.predict_proba(z).argmax(axis=1)]
    trust, other = model.trust(z), likeliest != model.predict(z)
    assert (trust[other] <= 0.5).all()
    assert (trust[~other] >= 0.5).all()


def test_trust_of_given_labels(rng: np.random.Generator) -> None:
    X, y = clouds(rng, (30, 25, 20))
    names = np.array(["ash", "birch", "cedar"])
    model = SEPClassifier().fit(X, names[y])
    z = rng.normal(size=(100, 3))
    given = rng.integers(0, 3, size=100)
    expected = model.sepc_(torch.from_numpy(z), torch.from_numpy(given)).trust.numpy()
    np.testing.assert_array_equal(model.trust(z, names[given]), expected)
    np.testing.assert_array_equal(model.trust(z, names[given].tolist()), expected)
    np.testing.assert_array_equal(model.trust(z, pd.Series(names[given])), expected)
    np.testing.assert_array_equal(model.trust(z, model.predict(z)), model.trust(z))


def test_given_labels_must_be_known_and_as_many_as_points(fitted: SEPClassifier) -> None:
    z = np.ones((2, 4))
    with pytest.warns(UserWarning, match="valid feature names"), pytest.raises(ValueError, match=r"not see: \\x1b\."):
        fitted.trust(z, ["setosa", "\x1b"])
    with pytest.warns(UserWarning, match="valid feature names"), pytest.raises(ValueError, match="2 rows and y has 1"):
        fitted.trust(z, ["setosa"])


def test_explanations_are_the_decision_path(iris: tuple[pd.DataFrame, pd.Series[Any]], fitted: SEPClassifier) -> None:
    X = iris[0].iloc[[0, 60, 120]]
    every = fitted.explain(X)
    assert isinstance(every, list)
    assert [e.details["label"] for e in every] == fitted.predict(X).tolist()
    assert [e.details["trust"] for e in every] == fitted.trust(X).tolist()
    assert set(every[0].details["features"]) == set(X.columns)
    one = fitted.explain(X, 1)
    assert isinstance(one, Explanation)
    assert one.details == every[1].details
    assert one.details["rule"] in Rule.__members__


@pytest.mark.slow
@pytest.mark.parametrize(
    "labels",
    [
        np.array([0, 1, 2]),
        np.array([-3.0, 0.0, 7.0]),
        np.array(["x", "yy", "zzz"]),
        np.array(["x", "yy", "zzz"], dtype=object),
    ],
    ids=["integers", "floats", "text", "objects of text"],
)
def test_labels_keep_their_dtype(rng: np.random.Generator, labels: Array) -> None:
    X, y = clouds(rng, (30, 30, 30), dim=2)
    model = SEPClassifier().fit(X, labels[y])
    assert model.classes_.dtype == labels.dtype
    assert model.predict(X).dtype == labels.dtype
    assert set(model.predict(X)) <= set(labels)


def test_boolean_labels(rng: np.random.Generator) -> None:
    X, y = clouds(rng, (30, 30), dim=2)
    predicted = SEPClassifier().fit(X, y == 1).predict(X)
    assert predicted.dtype == bool


def test_data_frames_in_a_pipeline(iris: tuple[pd.DataFrame, pd.Series[Any]]) -> None:
    X, y = iris
    pipeline = make_pipeline(StandardScaler(), PCA(2), SEPClassifier()).set_output(transform="pandas").fit(X, y)
    assert pipeline[-1].feature_names_in_.tolist() == ["pca0", "pca1"]
    assert pipeline.score(X, y) > 0.9
    assert "pca0" in str(pipeline[-1].explain(pipeline[:-1].transform(X), 0))
    renamed = X.rename(columns={X.columns[0]: "other"})
    with pytest.raises(ValueError, match="feature names should match"):
        pipeline.predict(renamed)


@pytest.mark.slow
def test_cross_validation_and_grid_search(iris: tuple[pd.DataFrame, pd.Series[Any]]) -> None:
    X, y = iris
    pipeline = make_pipeline(StandardScaler(), SEPClassifier())
    assert cross_val_score(pipeline, X, y, cv=3).mean() > 0.85
    search = GridSearchCV(pipeline, {"sepclassifier__max_impure": [0, 5]}, cv=2).fit(X, y)
    assert search.best_params_["sepclassifier__max_impure"] in (0, 5)
    assert search.best_estimator_[-1].partition_.made["max_impure"] == search.best_params_["sepclassifier__max_impure"]
    assert search.predict_proba(X).shape == (150, 3)
    # A scorer that needs probabilities.
    assert cross_val_score(SEPClassifier(), X, y, cv=3, scoring="roc_auc_ovr").mean() > 0.9


def test_processes_do_not_change_the_result(iris: tuple[pd.DataFrame, pd.Series[Any]], fitted: SEPClassifier) -> None:
    assert SEPClassifier(n_jobs=2).fit(*iris).partition_ == fitted.partition_


def test_clone_and_pickle(iris: tuple[pd.DataFrame, pd.Series[Any]], fitted: SEPClassifier) -> None:
    parameters = {
        "max_impure": 5,
        "rest": "partitioned",
        "standardize": False,
        "nearest": "euclidean",
        "solver": "native",
        "floor": 0.01,
        "n_jobs": None,
    }
    model = SEPClassifier(**parameters)  # type: ignore[arg-type]
    assert model.get_params() == parameters == clone(model.fit(*iris)).get_params()
    assert not hasattr(clone(model), "sepc_")
    made = model.partition_.made
    assert (made["max_impure"], made["standardize"], made["floor"]) == (5, False, 0.01)
    for original in (fitted, model):
        again = pickle.loads(pickle.dumps(original))
        np.testing.assert_array_equal(again.predict_proba(iris[0]), original.predict_proba(iris[0]))
        assert again.partition_ == original.partition_


def test_the_saved_model_agrees_with_the_classifier(
    iris: tuple[pd.DataFrame, pd.Series[Any]], fitted: SEPClassifier, tmp_path: Path
) -> None:
    fitted.sepc_.save(tmp_path / "model.safetensors")
    loaded = SEPC.load(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(loaded.predict(np.array(iris[0])), fitted.predict(iris[0]))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"max_impure": -1}, "max_impure must be an integer of at least 0"),
        ({"nearest": "manhattan"}, "nearest must be one of"),
        ({"solver": "abacus"}, "solver.*'abacus'"),
        ({"floor": 0.0}, "floor must be a positive number"),
    ],
)
def test_bad_parameters_are_refused_by_fit(parameters: dict[str, Any], message: str) -> None:
    X, y = load_iris(return_X_y=True)
    with pytest.raises(ValueError, match=message):
        SEPClassifier().set_params(**parameters).fit(X, y)
