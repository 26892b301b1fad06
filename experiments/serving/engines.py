"""Do Dask and Ray Data score every row of Parquet files once, with the answers of one process?

One Dask worker of two is killed on the way. Every row must come out once, with the decision of one big batch.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.harness import arguments, write_results
from sepc_torch import Scorer, TrustHead

FEATURES = 8
CLASSES = 5
FILES = 10


def rows(count: int, seed: int) -> pd.DataFrame:
    """Embeddings of Gaussian classes, with labels and ids."""
    rng = np.random.default_rng(seed)
    centres = 2.0 * np.random.default_rng(0).normal(size=(CLASSES, FEATURES))
    label = rng.integers(0, CLASSES, count)
    points = (rng.normal(size=(count, FEATURES)) + centres[label]).astype(np.float32)
    frame = pd.DataFrame(points, columns=[f"f{j}" for j in range(FEATURES)])
    return frame.assign(label_known=label, id=np.arange(count))


def prepare(folder: Path, count: int, seed: int) -> tuple[Scorer, pd.DataFrame]:
    """Save a head and Parquet files in a folder; return the scorer and the scores of one big batch."""
    train, held = rows(2000, seed + 1), rows(500, seed + 2)
    names = [f"f{j}" for j in range(FEATURES)]
    head = TrustHead.fit(train[names], train["label_known"], dim=4, reference_points=500, progress=False)
    head.calibrate(held[names], held["label_known"]).save(folder / "head.safetensors")
    table = rows(count, seed)
    (folder / "rows").mkdir()
    for i, part in enumerate(np.array_split(np.arange(count), FILES)):
        table.iloc[part].to_parquet(folder / "rows" / f"{i}.parquet")
    scorer = Scorer(folder / "head.safetensors", "cpu", keep=["id"])
    return scorer, scorer(table)


def by_dask(folder: Path, scorer: Scorer) -> pd.DataFrame:
    """Scores from a cluster of two worker processes, one of which is killed after the first partition."""
    import dask.dataframe as dd
    import distributed

    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster, timeout=60) as client,
    ):
        client.wait_for_workers(2, timeout=60)
        workers = client.run(os.getpid)
        table = dd.read_parquet(folder / "rows")
        scored = table.map_partitions(scorer, meta=scorer(table._meta))
        parts = client.compute(scored.to_delayed())
        distributed.wait(parts, return_when="FIRST_COMPLETED")
        os.kill(next(iter(workers.values())), signal.SIGKILL)
        return pd.concat(client.gather(parts))


def by_ray(folder: Path, scorer: Scorer) -> pd.DataFrame:
    """Scores from Ray Data with actors that load the head once."""
    import ray

    # 200 MB of object store, because the default is a third of the machine's memory.
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200_000_000)
    try:
        ray.data.DataContext.get_current().enable_progress_bars = False
        table = ray.data.read_parquet(str(folder / "rows"))
        scored = table.map_batches(
            Scorer,
            fn_constructor_args=(scorer.path, scorer.device),
            fn_constructor_kwargs={"keep": scorer.keep},
            compute=ray.data.ActorPoolStrategy(size=1),
            batch_size=2048,
        )
        return scored.to_pandas()
    finally:
        ray.shutdown()


ENGINES: dict[str, Callable[[Path, Scorer], pd.DataFrame]] = {"dask": by_dask, "ray": by_ray}


def compare(got: pd.DataFrame, want: pd.DataFrame) -> dict[str, Any]:
    """Numbers of rows that are lost, doubled or decided differently, and the largest difference of joint scores."""
    ids = got["id"].to_numpy()
    got = got.sort_values("id", ignore_index=True)
    same_rows = len(got) == len(want) and (got["id"].to_numpy() == want["id"].to_numpy()).all()
    decided = ["label", "rule", "accept", "reason"]
    return {
        "rows": len(got),
        "lost": len(set(want["id"]) - set(ids)),
        "twice": len(ids) - len(set(ids)),
        "different": int((got[decided].astype(str) != want[decided].astype(str)).any(axis=1).sum())
        if same_rows
        else -1,
        "joint_apart": float((got["joint"] - want["joint"]).abs().max()) if same_rows else float("nan"),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, help="number of rows (default: 1 million; 2000 with --smoke)")
    parser.add_argument("--engine", choices=ENGINES, help="run this engine only")
    options = parser.parse_args()
    count = options.rows or (2000 if options.smoke else 1_000_000)
    found = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        scorer, want = prepare(folder, count, options.seed)
        for name in [options.engine] if options.engine else ENGINES:
            begun = time.perf_counter()
            try:
                scores = ENGINES[name](folder, scorer)
            except ImportError as error:  # ray has no wheel for some platforms
                print(f"{name}: skipped, {error}")
                continue
            found[name] = {**compare(scores, want), "seconds": time.perf_counter() - begun}
            print(name, found[name], flush=True)
            wrong = {key: found[name][key] for key in ("lost", "twice", "different") if found[name][key]}
            if wrong or found[name]["rows"] != count:
                raise SystemExit(f"{name} does not give the answers of one batch: {found[name]}")
    if not options.smoke and options.rows is None and not options.engine:
        write_results("engines", options, ("dask", "ray"), {"engines": found})


if __name__ == "__main__":
    main()
