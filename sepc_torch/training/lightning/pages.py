"""Reports and figures of a stage: HTML pages that link the epochs, and pictures for TensorBoard and CSV loggers."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from sepc_torch.head.drift import DriftReport
from sepc_torch.head.trust_head import TrustHead
from sepc_torch.training.callbacks import StageResult
from sepc_torch.training.subsets import random_subset

# Points of the picture of the embedding: more of them hide each other.
_MOST_POINTS = 2000
_DPI = 110


def file_stem(name: str, epoch: int, step: int) -> str:
    """Name of the files of a stage without suffix; a head given by the user has no epoch.

    >>> file_stem("val", 3, 64), file_stem("test", -1, -1)
    ('val-epoch=3-step=64', 'test')
    """
    return f"{name}-epoch={epoch}-step={step}" if epoch >= 0 else name


def write_page(
    folder: Path, name: str, epoch: int, step: int, head: TrustHead, found: StageResult, drift: DriftReport | None
) -> Path:
    """Write the report of a stage, with links to the reports of the stage at earlier steps."""
    from sepc_torch.report import write_report  # imported here: the packages of a report are optional

    folder.mkdir(parents=True, exist_ok=True)
    rows = found.rows
    return write_report(
        on_cpu(head),
        rows["emb"],
        rows.get("target"),
        rows.get("logits"),
        folder / f"{file_stem(name, epoch, step)}.html",
        ids=found.ids,
        drift=drift,
        title=f"Trust: {name}" if epoch < 0 else f"Trust: {name}, epoch {epoch}",
        earlier=earlier_pages(folder, name, step),
    )


def earlier_pages(folder: Path, name: str, step: int) -> list[tuple[str, str]]:
    """Titles and file names of the reports of a stage at earlier steps, the oldest first."""
    found = []
    for path in folder.glob(f"{name}-epoch=*.html"):
        parts = re.fullmatch(r"epoch=(\d+)-step=(\d+)", path.stem.removeprefix(f"{name}-"))
        if parts is not None and int(parts[2]) < step:
            found.append((int(parts[2]), int(parts[1]), path.name))
    epochs = [epoch for _, epoch, _ in found]
    return [
        (f"epoch {epoch}" if epochs.count(epoch) == 1 else f"epoch {epoch}, step {at}", file)
        for at, epoch, file in sorted(found)
    ]


def figure_loggers(loggers: Iterable[Any]) -> list[tuple[str, Any]]:
    """The loggers that take figures, each with its kind: TensorBoard's and CSV loggers, of either Lightning package."""
    found: list[tuple[str, Any]] = []
    for logger in loggers:
        names = {each.__name__ for each in type(logger).__mro__}
        found += [(kind, logger) for kind in ("TensorBoardLogger", "CSVLogger") if kind in names]
    return found


def log_figures(loggers: Iterable[Any], tag: str, step: int, head: TrustHead, found: StageResult) -> None:
    """Give the figures of a stage to loggers: TensorBoard shows them, a CSV logger gets PNG files in its folder."""
    takers = figure_loggers(loggers)
    for name, figure in figures(head, found).items() if takers else ():
        for kind, logger in takers:
            if kind == "TensorBoardLogger":
                logger.experiment.add_figure(f"{tag}_{name}", figure, step)
            else:
                path = Path(logger.log_dir) / "figures" / f"{tag.replace('/', '_')}_{name}-step={step}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                figure.savefig(path, dpi=_DPI)


def figures(head: TrustHead, found: StageResult) -> dict[str, Any]:
    """Figures of a stage by name: the embedding and, with true labels, risk over coverage and reliability."""
    from matplotlib.figure import Figure

    from sepc_torch.plot import draw_embedding, draw_reliability, draw_risk_coverage  # imported here: an extra

    rows = found.rows
    logits = rows.get("logits")
    softmax = {} if logits is None else {"softmax": logits.softmax(dim=1).amax(dim=1)}
    drawn = {}
    if "target" in rows and bool((rows["target"] >= 0).any()):
        known = rows["target"] >= 0  # no label of an unknown class is right
        right, known_softmax = found.right[known], {name: score[known] for name, score in softmax.items()}
        promised = None if head.promise is None else head.promise.risk
        accepted = float((rows["reason"] < 0)[known].double().mean())
        drawn["risk_coverage"] = Figure(figsize=(6.4, 4.2), layout="constrained")
        draw_risk_coverage(
            {"head": rows["joint"][known], **known_softmax},
            right,
            chosen=accepted,
            promised=promised,
            ax=drawn["risk_coverage"].subplots(),
        )
        drawn["reliability"] = Figure(figsize=(5.0, 4.6), layout="constrained")
        draw_reliability(
            {"head": rows["confidence"][known], **known_softmax}, right, ax=drawn["reliability"].subplots()
        )
    few = random_subset(torch.arange(len(found.ids)), _MOST_POINTS)
    drawn["embedding"] = Figure(figsize=(8.0, 5.5), layout="constrained")
    draw_embedding(
        on_cpu(head), rows["emb"][few], None if logits is None else logits[few], ax=drawn["embedding"].subplots()
    )
    return drawn


def on_cpu(head: TrustHead) -> TrustHead:
    """The head on the CPU: itself, or a copy."""
    return head if next(head.buffers()).device.type == "cpu" else copy.deepcopy(head).cpu()
