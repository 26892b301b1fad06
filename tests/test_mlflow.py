"""The MLflow flavour, in a fresh process: importing MLflow changes settings of the whole process."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from sepc_torch import TrustHead
from sepc_torch.data.table_encoding import TableEncoding
from sepc_torch.serving.mlflow import PyfuncHead, input_example

pytestmark = pytest.mark.slow

SCRIPT = """
    import pathlib, sys, warnings
    import mlflow, numpy as np, pandas as pd
    import sepc_torch.serving.mlflow
    from sepc_torch import TrustHead
    folder = pathlib.Path(sys.argv[1])
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 240)
    x = rng.normal(size=(240, 4)) + 3.0 * np.eye(3, 4)[y]
    names, logits = np.array(["a", "b", "c"])[y], 3.0 * x[:, :3]
    table = pd.DataFrame(x, columns=list("pqrs"))
    head = TrustHead.fit(table, names, dim=3, classes=["a", "b", "c"]).calibrate(table + 0.1, names, logits)
    sepc_torch.serving.mlflow.save_model(head, folder / "model", metadata={"owner": "me"})
    kinds = {path.suffix for path in (folder / "model").rglob("*") if path.is_file()}
    assert kinds == {"", ".yaml", ".json", ".txt", ".safetensors"}, kinds
    model = mlflow.pyfunc.load_model(str(folder / "model"))
    assert model.metadata.metadata == {"owner": "me"}
    assert [column.name for column in model.metadata.signature.inputs] == [*"pqrs", "logits"]
    assert model.metadata.signature.outputs.inputs[0].name == "prediction"
    out = model.predict(table.assign(logits=list(logits)))
    want = head.judge(table, logits)
    assert (out["prediction"] == np.array(head.classes)[want.network_label]).all()
    assert (out["accept"] == want.accept.numpy()).all()
    assert len(model.predict(model.input_example)) == 2
    assert sepc_torch.serving.mlflow.load_model(folder / "model").classes == ["a", "b", "c"]
    mlflow.set_tracking_uri((folder / "runs").as_uri())
    with mlflow.start_run():
        logged = sepc_torch.serving.mlflow.log_model(head, "trust")
    again = mlflow.pyfunc.load_model(logged.model_uri).predict(table.assign(logits=list(logits)))
    assert (again["label"] == out["label"]).all()
    assert sepc_torch.serving.mlflow.load_model(logged.model_uri).feature_names == ("p", "q", "r", "s")

    # Warnings are errors from here, except those of MLflow's own calls of pandas, which pandas 4 will not take.
    warnings.filterwarnings("error")
    for message in ("Starting with pandas version 4", "The inplace keyword in DataFrame", "Operation with range is"):
        warnings.filterwarnings("ignore", message)
    truth = np.where(np.arange(240) % 7 == 0, "a", names)
    data, options = table.assign(logits=list(logits), truth=truth), {"targets": "truth", "model_type": "classifier"}
    with mlflow.start_run():
        for path in (str(folder / "model"), logged.model_uri):
            found = mlflow.models.evaluate(path, data, model_config={"column": "prediction"}, **options).metrics
            assert found["accuracy_score"] == (out["prediction"] == truth).mean() < 1.0, found
            assert found["example_count"] == 240
        sure = out.assign(truth=truth)[out["confidence"] > 0.9]
        found = mlflow.models.evaluate(data=sure, predictions="prediction", **options).metrics
        assert found["accuracy_score"] == (sure["prediction"] == sure["truth"]).mean()
        assert found["example_count"] == len(sure) < 240
    try:
        mlflow.pyfunc.load_model(str(folder / "model"), model_config={"column": "sure"}).predict(data)
    except ValueError as error:
        assert "asks for the column 'sure'; the scores are prediction, label, trust" in str(error)
    else:
        raise AssertionError("a column that does not exist was returned")
"""


@pytest.mark.slow
def test_models_are_saved_logged_loaded_and_evaluated(tmp_path: Path) -> None:
    if importlib.util.find_spec("mlflow") is None:
        pytest.skip("needs the extra mlflow")
    quiet = {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(SCRIPT), str(tmp_path)]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **quiet}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_input_example_has_the_columns_of_the_head() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 3)), np.arange(60) % 2
    head = TrustHead.fit(x, y, dim=2)
    assert list(input_example(head)) == ["z"]
    head.calibrate(x + 0.1, y, rng.normal(size=(60, 2)))
    assert list(input_example(head)) == ["z", "logits"]
    assert head.judge(np.stack(input_example(head)["z"].to_list())).label.shape == (2,)


def test_a_model_of_a_table_takes_its_columns(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    y = np.arange(100) % 2
    table = pd.DataFrame({"age": 40 + 9 * rng.normal(size=100) + 20 * y, "pet": np.array(["cat", "dog"])[y]})
    encoding = TableEncoding.fit(table, ["age"], ["pet"])
    fitted = TrustHead.fit(encoding.encode(table).points, y, normalize=None)
    head = TrustHead(fitted.projection, fitted.sepc, fitted.evidence, encoding=encoding)
    assert list(input_example(head)) == ["age", "pet"]
    head.save(tmp_path / "head.safetensors")
    model = PyfuncHead(tmp_path / "head.safetensors")
    assert len(model.predict(input_example(head))) == 2
    assert model.predict(table)["prediction"].tolist() == head.predict(table).tolist()
