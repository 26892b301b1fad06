"""Tests of the callback for the Trainer of transformers; ``make test-models RECIPE=transformers`` runs them."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from sepc_torch import TrustCallback, TrustedModel
from sepc_torch.training import transformers as module
from sepc_torch.training.flags import logged_names, no_numbers
from sepc_torch.training.subsets import calibration_half

Rows = list[dict[str, Any]]
CLASSES, WORDS = 3, 20


def texts(n: int, rng: np.random.Generator) -> Rows:
    """Texts of six words, of which some belong to the class; a column of text is not for the network."""
    rows = []
    for label in rng.permutation(np.arange(n) % CLASSES).tolist():
        words = np.where(rng.random(6) < 0.4, rng.integers(3 * label, 3 * label + 3, 6), rng.integers(9, WORDS, 6))
        rows.append({"input_ids": torch.from_numpy(words), "labels": label, "text": "not for the network"})
    return rows


def tiny_bert(kind: str = "BertForSequenceClassification", **options: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=WORDS, **{"num_labels": CLASSES, **size, **options})
    return getattr(transformers, kind)(config)


def make_trainer(folder: Path, train: Any, validation: Any, network: Any = None, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    usual = {"num_train_epochs": 2, "per_device_train_batch_size": 50, "learning_rate": 2e-3, "eval_strategy": "epoch"}
    usual |= {"save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no"}
    usual |= {"dataloader_pin_memory": False}
    network = tiny_bert() if network is None else network
    args = TrainingArguments(output_dir=str(folder), **{**usual, **options})
    return Trainer(network, args, train_dataset=train, eval_dataset=validation)


def with_callback(trainer: Any, **options: Any) -> TrustCallback:
    callback = TrustCallback(trainer, **options)
    trainer.add_callback(callback)
    return callback


def logs(trainer: Any) -> list[dict[str, float]]:
    """The logged numbers of the callback, one dictionary for each evaluation."""
    return [entry for entry in trainer.state.log_history if any(name.startswith("eval_trust/") for name in entry)]


def test_without_transformers_an_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TrainerCallback", object)
    with pytest.raises(ImportError, match="pip install transformers accelerate"):
        TrustCallback(None)


@pytest.mark.models
class TestCallback:
    @pytest.fixture(autouse=True)
    def libraries(self) -> None:
        for name in ("transformers", "accelerate"):
            pytest.importorskip(name, reason=f"needs {name}: make test-models RECIPE=transformers")

    def test_labels_are_judged_and_training_is_unchanged(self, tmp_path: Path, rng: np.random.Generator) -> None:
        train, validation = texts(300, rng), texts(300, rng)

        def trained(judged: bool) -> tuple[Any, TrustCallback | None, list[Any]]:
            trainer = make_trainer(tmp_path, train, validation)
            callback = with_callback(trainer) if judged else None
            trainer.train()
            return trainer, callback, [torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()]  # noqa: NPY002

        plain, _, plain_numbers = trained(judged=False)
        trainer, callback, numbers = trained(judged=True)
        assert callback is not None
        for name, weight in plain.model.state_dict().items():
            assert torch.equal(trainer.model.state_dict()[name], weight), name
        assert numbers == plain_numbers
        assert not trainer.model.classifier._forward_hooks

        found = trainer.predict(validation)
        rows = callback.scores["val"].find(range(len(validation)))
        assert rows["network_label"] == found.predictions.argmax(axis=1).tolist()
        assert rows["target"] == found.label_ids.tolist()
        measured = ~calibration_half(torch.arange(len(validation)))
        assert rows["calibrates"] == (~measured).tolist()
        assert callback.flagged["val"].ids == tuple(row["id"] for row in callback.scores["val"].rows() if row["reason"])

        one, two = logs(trainer)
        named = {f"eval_trust/{name}": value for name, value in logged_names("val", no_numbers(True)).items()}
        assert {*one} == {*two} == {*named, "epoch", "step"}
        right = (rows.columns["network_label"] == rows.columns["target"])[measured]
        assert two["eval_trust/val_n"] == measured.sum()
        assert two["eval_trust/val_acc"] == pytest.approx(right.double().mean().item())
        accepted = (rows.columns["reason"] < 0)[measured]
        assert two["eval_trust/val_accepted"] == pytest.approx(accepted.double().mean().item())
        # An evaluation with the same weights uses the same head, and returns its numbers.
        head = callback.head
        metrics = trainer.evaluate()
        assert callback.head is head
        assert {name: metrics[name] for name in named} == pytest.approx({n: two[n] for n in named}, nan_ok=True)

    def test_the_head_judges_new_samples(self, tmp_path: Path, rng: np.random.Generator) -> None:
        validation = texts(300, rng)
        trainer = make_trainer(tmp_path, texts(300, rng), validation)
        callback = with_callback(trainer)
        trainer.train()
        assert callback.head is not None
        assert callback.places is not None
        assert callback.places.last == "classifier"
        trusted = TrustedModel(trainer.model, callback.head, callback.places).eval()
        with torch.no_grad():
            out = trusted(input_ids=torch.stack([row["input_ids"] for row in validation]))
        rows = callback.scores["val"].find(range(len(validation)))
        assert torch.allclose(out.joint, rows.columns["joint"], atol=1e-4)

    def test_several_data_sets(self, tmp_path: Path, rng: np.random.Generator) -> None:
        trainer = make_trainer(tmp_path, texts(300, rng), {"a": texts(200, rng), "b": texts(100, rng)})
        callback = with_callback(trainer)
        trainer.train()
        head = callback.head
        metrics = trainer.evaluate(texts(50, rng), metric_key_prefix="test")
        assert callback.head is head
        assert [*callback.scores] == ["val_a", "val_b", "test"]
        assert "calibrates" in callback.scores["val_a"].columns
        assert metrics["eval_trust/test_n"] == len(callback.scores["test"]) == 50
        assert "calibrates" not in callback.scores["val_b"].columns
        assert logs(trainer)[1]["eval_trust/val_b_n"] == 100

    def test_its_numbers_choose_the_checkpoint(self, tmp_path: Path, rng: np.random.Generator) -> None:
        choice = {"metric_for_best_model": "trust/val_acc_at_80", "greater_is_better": True, "save_strategy": "epoch"}
        trainer = make_trainer(
            tmp_path, texts(300, rng), texts(300, rng), load_best_model_at_end=True, learning_rate=5e-3, **choice
        )
        callback = with_callback(trainer)
        trainer.train()
        best = max(logs(trainer), key=lambda entry: entry["eval_trust/val_acc_at_80"])
        assert trainer.state.best_metric == best["eval_trust/val_acc_at_80"]
        # The head follows the weights that were restored.
        assert trainer.evaluate()["eval_trust/val_acc_at_80"] == pytest.approx(best["eval_trust/val_acc_at_80"])
        assert callback.head is not None

    def test_data_of_its_own(self, tmp_path: Path, rng: np.random.Generator) -> None:
        trainer = make_trainer(tmp_path, texts(200, rng), texts(200, rng))
        callback = with_callback(trainer, fit_data=texts(90, rng), calibrate=texts(200, rng), risk=0.9, fit={"dim": 2})
        trainer.evaluate()  # before any training
        assert callback.head is not None
        assert callback.head.sepc.dim == 2
        assert logs(trainer)[0]["eval_trust/val_n"] == 200
        assert callback.head.promise is not None
        assert callback.head.promise.risk == 0.9

    @pytest.mark.parametrize("options", [{"bf16": True}, {"bf16_full_eval": True}, {"torch_compile": True}])
    def test_precision_and_compilation(
        self, tmp_path: Path, rng: np.random.Generator, options: dict[str, bool]
    ) -> None:
        if "torch_compile" in options:
            options = {**options, "torch_compile_backend": "eager"}  # type: ignore[dict-item]
        trainer = make_trainer(tmp_path, texts(200, rng), texts(200, rng), **options)
        callback = with_callback(trainer)
        trainer.train()
        assert len(callback.scores["val"]) == 200
        assert not callback.scores["val"].columns["joint"].isnan().any()

    def test_too_few_samples_to_calibrate(self, tmp_path: Path, rng: np.random.Generator) -> None:
        trainer = make_trainer(tmp_path, texts(200, rng), texts(20, rng))
        callback = with_callback(trainer, flag_rate=0.1)
        with pytest.warns(UserWarning, match="fewer than 20 labelled samples"):
            trainer.evaluate()
        assert len(callback.flagged["val"]) == 2

    def test_a_fit_that_fails_does_not_end_training(self, tmp_path: Path, rng: np.random.Generator) -> None:
        trainer = make_trainer(tmp_path, texts(200, rng), texts(200, rng), metric_for_best_model="trust/val_aurc")
        with_callback(trainer, fit={"dim": 1000})
        with pytest.warns(UserWarning, match="the fit failed"):
            trainer.train()
        assert all(math.isnan(entry["eval_trust/val_aurc"]) for entry in logs(trainer))

    def test_errors_say_what_to_do(self, tmp_path: Path, rng: np.random.Generator) -> None:
        class Stream(IterableDataset[Any]):
            def __iter__(self) -> Any:
                return iter(texts(10, rng))

        rows = texts(60, rng)
        trainer = make_trainer(tmp_path, Stream(), rows, max_steps=2)
        with_callback(trainer)
        with pytest.raises(ValueError, match=r"a Stream has none\. Pass an indexable data set"):
            trainer.evaluate()
        trainer = make_trainer(tmp_path, [{**row, "labels": -100} for row in rows], rows)
        with_callback(trainer)
        with pytest.raises(ValueError, match="labels 'labels' from 0 to 2"):
            trainer.evaluate()
        trainer = make_trainer(tmp_path, rows, rows, network=tiny_bert("BertForQuestionAnswering"))
        with pytest.raises(ValueError, match="label_names"):
            TrustCallback(trainer)
        tokens = [{**row, "labels": torch.zeros(6, dtype=torch.int64)} for row in rows]
        trainer = make_trainer(tmp_path, tokens, tokens, network=tiny_bert("BertForTokenClassification"))
        with_callback(trainer)
        with pytest.raises(ValueError, match="labels every position"):
            trainer.evaluate()

    def test_a_regression_has_no_labels_to_judge(self, tmp_path: Path, rng: np.random.Generator) -> None:
        rows = [{**row, "labels": 0.5 + row["labels"]} for row in texts(60, rng)]
        trainer = make_trainer(tmp_path, rows, rows, network=tiny_bert(num_labels=1))
        with_callback(trainer)
        with pytest.raises(TypeError, match="regression"):
            trainer.evaluate()
