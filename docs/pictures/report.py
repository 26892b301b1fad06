"""Write the sample page of the documentation, and draw its picture with Chromium: ``python docs/pictures/report.py``.

Made-up applications for loans: a model learnt from last year's, and this year's applicants are older. The build of the
documentation writes the page anew, without the picture.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from PIL import Image
from sklearn.linear_model import LogisticRegression

from sepc_torch import TrustHead, write_report
from sepc_torch.data.table_encoding import TableEncoding

FOLDER = Path(__file__).parent
CLASSES = ["refuse", "small", "large"]
SIZE = (1000, 1180)  # of the picture, in pixels


class Applications(NamedTuple):
    """Applications for loans: the table, and the decision of a person about each."""

    table: pd.DataFrame
    decision: np.ndarray


def applications(n: int, rng: np.random.Generator, older: float = 0.0) -> Applications:
    job = rng.choice(["clerk", "nurse", "driver", "teacher"], n, p=[0.4, 0.3, 0.2, 0.1])
    age = rng.normal(41.0 + older, 9.0, n).clip(18.0, 90.0).round()
    income = rng.lognormal(3.4, 0.35, n) + 9.0 * (job == "teacher")
    debt = rng.gamma(2.0, 4.0, n)
    table = pd.DataFrame({"age": age, "income": income.round(1), "debt": debt.round(1), "job": job})
    table.loc[rng.random(n) < 0.06, "debt"] = np.nan
    score = (income - 1.4 * debt - 0.15 * (age - 41.0) + rng.normal(0.0, 2.5, n)) / 10.0
    return Applications(table, np.digitize(score, [1.6, 3.2]))


def write_sample(path: Path) -> Path:
    """Fit and calibrate a head on made-up applications, and write the report of new ones."""
    rng = np.random.default_rng(3)
    train, held, new = applications(600, rng), applications(1000, rng), applications(250, rng, older=5.0)
    encoding = TableEncoding.fit(train.table, ["age", "income", "debt"], ["job"])
    z = encoding.encode(train.table).points
    model = LogisticRegression(max_iter=2000).fit(z, train.decision)

    def logits(rows: Applications) -> np.ndarray:
        return np.asarray(model.decision_function(encoding.encode(rows.table).points))

    head = TrustHead.fit(z, train.decision, normalize=None, encoding=encoding, progress=False)
    head.calibrate(held.table, held.decision, logits(held)).accept_at(risk=0.05)
    return write_report(
        head,
        *(new.table, new.decision, logits(new), path),
        ids=[f"application {i + 1}" for i in range(len(new.table))],
        class_names=CLASSES,
        title="Loans, first quarter",
        model="loans.safetensors",
        data="applications.csv",
    )


def draw_sample(page: Path, picture: Path) -> Path:
    """Draw the top of a page."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise SystemExit("The picture needs Chromium (Debian: chromium).")
    with tempfile.TemporaryDirectory() as folder:
        drawn = Path(folder) / "page.png"
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        flags += ["--hide-scrollbars", f"--user-data-dir={folder}/profile", f"--window-size={SIZE[0]},{SIZE[1]}"]
        command = [chromium, *flags, f"--screenshot={drawn}", page.resolve().as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        image = Image.open(io.BytesIO(drawn.read_bytes())).convert("RGB")
    image.quantize(96, Image.Quantize.MAXCOVERAGE).save(picture, optimize=True)
    return picture


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        page = write_sample(Path(folder) / "report.html")
        picture = draw_sample(page, FOLDER / "report.png")
        print(picture, picture.stat().st_size // 1000, "kB; page", page.stat().st_size // 1000, "kB")
