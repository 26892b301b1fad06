"""MLflow flavour of trust heads: ``save_model``, ``log_model`` and ``load_model`` (extra ``mlflow``).

A saved model is a folder with the head as safetensors, a signature and an input example, and no pickle. MLflow loads it
as a ``pyfunc`` model, for ``mlflow models serve``, ``mlflow.pyfunc.spark_udf`` or ``mlflow.models.evaluate``. Its
``predict`` takes a table of embeddings, or of the columns of a ``sepc fit`` model, and returns a table of scores; the
column ``prediction`` is the label. Loaded with ``model_config={"column": "prediction"}``, it returns this column alone,
which MLflow's evaluator of classifiers needs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sepc_torch.head.trust_head import TrustHead
from sepc_torch.serving.scorer import LOGITS, Scorer

if TYPE_CHECKING:
    import pandas as pd

FLAVOR = "sepc_torch"
_FILE = "head.safetensors"
# Rows of the input example.
_EXAMPLE_ROWS = 2


class PyfuncHead:
    """A head as MLflow's ``pyfunc`` calls it.

    Args:
        path: File that :meth:`TrustHead.save` wrote.
        column: Name of the only column to return; by default all of them.
        trust: Whether to load an estimator of the head's user; see :meth:`TrustHead.load`.
    """

    def __init__(self, path: str | os.PathLike[str], column: str | None = None, trust: bool = False) -> None:
        self.scorer = Scorer(path, trust=trust)
        self.column = column

    def predict(self, data: Any, params: dict[str, Any] | None = None) -> pd.DataFrame | pd.Series:
        """Score a table or an array; ``prediction`` is the network's label, or the head's own without logits."""
        import pandas as pd

        columns = self.scorer(data)
        frame = columns if isinstance(columns, pd.DataFrame) else pd.DataFrame(columns)
        frame.insert(0, "prediction", frame["network_label"])
        if self.column is None:
            return frame
        if self.column not in frame:
            raise ValueError(
                f"model_config asks for the column {self.column!r}; the scores are {', '.join(map(str, frame))}."
            )
        return frame[self.column]


def _load_pyfunc(path: str, model_config: dict[str, Any] | None = None) -> PyfuncHead:
    """Load a model; MLflow calls this function by name."""
    return PyfuncHead(Path(path) / _FILE if Path(path).is_dir() else path, **(model_config or {}))


def save_model(head: TrustHead, path: str | os.PathLike[str], mlflow_model: Any = None, **metadata: Any) -> None:
    """Write a head as an MLflow model.

    Args:
        head: The head. With a calibration for logits, the signature has a column of logits.
        path: Folder to create.
        mlflow_model: The :class:`mlflow.models.Model` to add to; by default a new one.
        metadata: Further arguments of :func:`mlflow.pyfunc.save_model`, for instance ``metadata={"owner": "me"}``.

    >>> head = TrustHead.fit([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 2.0]], ["a", "a", "b", "b"], dim=1)
    >>> save_model(head, "model")  # doctest: +SKIP
    >>> load_model("model").classes  # doctest: +SKIP
    ['a', 'b']
    """
    import tempfile

    import mlflow.pyfunc
    from mlflow.models import Model, ModelSignature, infer_signature

    example = input_example(head)
    model = Model() if mlflow_model is None else mlflow_model
    model.add_flavor(FLAVOR, data=f"data/{_FILE}", classes=[str(name) for name in head.classes])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / _FILE
        head.save(file)
        # This process made the head, and so trusts it.
        signature: ModelSignature = infer_signature(example, PyfuncHead(file, trust=True).predict(example))
        mlflow.pyfunc.save_model(
            str(path),
            loader_module=__name__,
            data_path=str(file),
            mlflow_model=model,
            **{
                "signature": signature,
                "input_example": example,
                "model_config": {"column": None, "trust": False},  # what a user of the model may set when loading it
                "pip_requirements": [f"sepc_torch=={_version()}", "pandas"],
                **metadata,
            },
        )


def log_model(head: TrustHead, name: str, **options: Any) -> Any:
    """Log a head to the current MLflow run; arguments and result as in :meth:`mlflow.models.Model.log`."""
    import sys

    from mlflow.models import Model

    return Model.log(None, name=name, flavor=sys.modules[__name__], head=head, **options)


def load_model(model_uri: str | os.PathLike[str], *, trust: bool = False) -> TrustHead:
    """Load the head itself from a folder, a run or a registry; ``mlflow.pyfunc.load_model`` loads the pyfunc model."""
    from mlflow.models import Model
    from mlflow.tracking.artifact_utils import _download_artifact_from_uri

    folder = Path(_download_artifact_from_uri(artifact_uri=str(model_uri)))
    flavors = Model.load(str(folder)).flavors
    if FLAVOR not in flavors:
        raise ValueError(f"{model_uri} has the flavours {sorted(flavors)}, not {FLAVOR!r}; save it with save_model.")
    return TrustHead.load(folder / flavors[FLAVOR]["data"], trust=trust)


def input_example(head: TrustHead) -> pd.DataFrame:
    """A table in the form that the head takes: its columns, or a column ``z`` of lists; ``logits`` if it needs them.

    >>> head = TrustHead.fit([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 2.0]], [0, 0, 1, 1], dim=1)
    >>> input_example(head)
                z
    0  [0.0, 1.0]
    1  [1.0, 0.0]
    """
    import pandas as pd

    rows = np.eye(head.in_features)[np.arange(_EXAMPLE_ROWS)[::-1] % head.in_features]
    if head.encoding is not None:
        cells: dict[str, Any] = {c.name: c.median for c in head.encoding.numbers if c.name in head.encoding.columns}
        cells |= {c.name: str(np.datetime64(int(c.last), "D")) for c in head.encoding.dates}
        cells |= {c.name: (*c.categories, "other")[0] for c in head.encoding.categories}
        frame = pd.DataFrame([cells] * _EXAMPLE_ROWS)
    elif head.feature_names is None:
        frame = pd.DataFrame({"z": rows.tolist()})
    else:
        frame = pd.DataFrame(rows, columns=list(head.feature_names))
    if head.takes_logits and head.classifier is None:
        frame[LOGITS] = np.eye(len(head.classes))[np.arange(_EXAMPLE_ROWS) % len(head.classes)].tolist()
    return frame


def _version() -> str:
    import sepc_torch

    return sepc_torch.__version__
