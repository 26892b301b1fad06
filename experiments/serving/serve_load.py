"""How does a server with dynamic batching answer many small requests, and does it lose or mix any?

The server of :mod:`sepc_torch.serving.server`, on the loopback interface, collects the requests that wait into one
batch for the head. Clients in another process send single rows over kept-alive connections. Every answer must be that
of the head for the row. Some requests are malformed and must be answered by 4xx while the others go on.
"""

from __future__ import annotations

import http.client
import json
import multiprocessing
import os
import resource
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn

from experiments.harness import arguments, write_results
from sepc_torch import Scorer, TrustHead
from sepc_torch.serving.server import create_app

FEATURES = 16
CLASSES = 5
CLIENTS = 32
# Rows in one batch at most.
BATCH = 256
# One request of this many is malformed.
MALFORMED_EVERY = 50
MALFORMED = ['{"z": [1.0, 2.0]}', "no JSON", '{"z": "text"}', "{}"]


def serve(path: str, ready: Any) -> None:
    """Serve a head on a free port, which is sent through ``ready``."""
    app = create_app(Scorer(path, "cpu", BATCH), most=BATCH)

    async def state() -> dict[str, Any]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        batcher = app.state.batcher
        return {"memory_bytes": peak, "mean_batch": batcher.rows / max(batcher.batches, 1)}

    app.get("/state")(state)
    listening = socket.create_server(("127.0.0.1", 0), backlog=CLIENTS * 4)
    ready.send(listening.getsockname()[1])
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])


def client(port: int, rows: list[int], points: np.ndarray, found: dict[int, Any], times: list[float]) -> None:
    """Send rows one after the other; keep the answers, and the status of malformed requests under negative keys."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    for row in rows:
        begun = time.perf_counter()
        connection.request("POST", "/score", json.dumps({"z": points[row].tolist()}))
        answer = connection.getresponse()
        content = answer.read()
        times.append(time.perf_counter() - begun)
        found[row] = json.loads(content) if answer.status == 200 else answer.status
        if row % MALFORMED_EVERY == 0:
            connection.request("POST", "/score", MALFORMED[row // MALFORMED_EVERY % len(MALFORMED)])
            answer = connection.getresponse()
            answer.read()
            found[-1 - row] = answer.status
    connection.close()


def state(port: int) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("GET", "/state")
    return json.loads(connection.getresponse().read())


def load(port: int, rows: range, points: np.ndarray) -> tuple[dict[int, Any], list[float], float]:
    """Answers, latencies and seconds of all clients together."""
    found: dict[int, Any] = {}
    times: list[float] = []
    shares = [list(rows[i::CLIENTS]) for i in range(CLIENTS)]
    threads = [threading.Thread(target=client, args=(port, share, points, found, times)) for share in shares]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, times, time.perf_counter() - begun


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--requests", type=int, help="number of requests (default: 100 000; 320 with --smoke)")
    options = parser.parse_args()
    count = options.requests or (320 if options.smoke else 100_000)
    rng = np.random.default_rng(options.seed)
    centres = 2.0 * rng.normal(size=(CLASSES, FEATURES))

    def draw(n: int) -> tuple[np.ndarray, np.ndarray]:
        y = rng.integers(0, CLASSES, n)
        return rng.normal(size=(n, FEATURES)) + centres[y], y

    head = TrustHead.fit(*draw(400 if options.smoke else 4000), dim=4, progress=False).calibrate(*draw(500))
    points, _ = draw(count)
    want = head.judge(points)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "head.safetensors")
        head.save(path)
        spawn = multiprocessing.get_context("spawn")
        ready, sender = spawn.Pipe(duplex=False)
        server = spawn.Process(target=serve, args=(path, sender), daemon=True)
        server.start()
        try:
            if not ready.poll(120):
                raise SystemExit("The server did not start within two minutes.")
            port = ready.recv()
            # The first tenth warms up; memory must not grow afterwards.
            warm, _, _ = load(port, range(count // 10), points)
            before = state(port)["memory_bytes"]
            rest, times, seconds = load(port, range(count // 10, count), points)
            after = state(port)
        finally:
            server.kill()
            server.join()
    found = {**warm, **rest}
    answers = {row: answer for row, answer in found.items() if row >= 0}
    statuses = [answer for row, answer in found.items() if row < 0]
    wrong = sum(
        not isinstance(answer, dict)
        or answer["accept"] != bool(want.accept[row])
        or answer["label"] != head.classes[int(want.label[row])]
        for row, answer in answers.items()
    )
    summary = {
        "requests": len(answers),
        "lost": count - len(answers),
        "wrong": wrong,
        "malformed": len(statuses),
        "malformed_not_4xx": sum(not 400 <= status < 500 for status in statuses),
        "clients": CLIENTS,
        "p50_ms": 1e3 * float(np.percentile(times, 50)),
        "p99_ms": 1e3 * float(np.percentile(times, 99)),
        "requests_per_s": len(rest) / seconds,
        "mean_batch": after["mean_batch"],
        "memory_growth_bytes": after["memory_bytes"] - before,
    }
    print(summary)
    if summary["lost"] or summary["wrong"] or summary["malformed_not_4xx"]:
        raise SystemExit("Answers were lost or wrong.")
    if not options.smoke:
        results = {"cores_used": os.cpu_count(), "load": summary}
        write_results("serve_load", options, ("fastapi", "uvicorn"), results)


if __name__ == "__main__":
    main()
