"""A FastAPI server for a scorer: requests of single rows, scored in batches, and ``/metrics`` (extra ``serving``)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
from fastapi import FastAPI, HTTPException, Request, Response

from sepc_torch.data.options import check_count
from sepc_torch.head.row_metrics import MEDIA_TYPE
from sepc_torch.serving.scorer import Scorer

Row = dict[str, Any]


class Batcher:
    """Collects rows that wait while the head is busy, and scores them together; a wrong row fails alone.

    Args:
        scorer: The scorer.
        most: Largest number of rows in a batch.
    """

    def __init__(self, scorer: Scorer, most: int = 256) -> None:
        self.scorer, self.most = scorer, check_count(most, "most", least=1)
        self.rows, self.batches = 0, 0
        self._waiting: asyncio.Queue[tuple[Row, asyncio.Future[Row]]] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def score(self, row: Row) -> Row:
        """Columns of one row, when its batch is scored."""
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._run())
        answer: asyncio.Future[Row] = loop.create_future()
        await self._waiting.put((row, answer))
        return await answer

    async def _run(self) -> None:
        """Score batches for ever; the head runs in a thread, so that requests arrive meanwhile."""
        while True:
            batch = [await self._waiting.get()]
            while len(batch) < self.most and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            self.rows, self.batches = self.rows + len(batch), self.batches + 1
            found = await asyncio.to_thread(self._scores, [row for row, _ in batch])
            for (_, answer), columns in zip(batch, found, strict=True):
                if answer.cancelled():
                    continue
                if isinstance(columns, Exception):
                    answer.set_exception(columns)
                else:
                    answer.set_result(columns)

    def _scores(self, rows: Sequence[Row]) -> list[Row | Exception]:
        """The scores of rows; the halves of a batch with a wrong row are scored apart."""
        try:
            columns = self.scorer({name: _column([row[name] for row in rows]) for name in rows[0]})
        except Exception as error:
            if len(rows) == 1:
                return [error]
            half = len(rows) // 2
            return self._scores(rows[:half]) + self._scores(rows[half:])
        # JSON has no NaN.
        values = {name: [None if v != v else v for v in column.tolist()] for name, column in columns.items()}
        return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]


def create_app(scorer: Scorer, *, most: int = 256) -> FastAPI:
    """Return a FastAPI application that scores single rows in batches.

    ``POST /score`` takes one row as a JSON object, such as ``{"z": [...], "logits": [...]}`` or the columns of a table,
    and answers with its columns; a row that cannot be scored is answered with 422. ``GET /metrics`` is text.
    With a guard, ``GET /promise`` is its report, ``POST /ask`` with ``{"budget": 20}`` answers with the rows to label,
    ``POST /labels`` takes ``{"rows": [...], "labels": [...]}``, and ``POST /recalibrate`` restores the promise. These
    calls change what is accepted: let only those reach them who may.

    Args:
        scorer: The scorer.
        most: Largest number of rows in a batch.
    """
    app, batcher = FastAPI(), Batcher(scorer, most)
    app.state.batcher = batcher

    async def score(request: Request) -> Row:
        row = await _body(request)
        if not row:
            raise HTTPException(422, "Expected a JSON object with the columns of one row.")
        try:
            return await batcher.score(row)
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise HTTPException(422, str(error)) from error

    async def metrics() -> Response:
        return Response(scorer.metrics(), media_type=MEDIA_TYPE)

    app.post("/score")(score)
    app.get("/metrics")(metrics)
    guard = scorer.guard
    if guard is None:
        return app

    def called(call: Callable[[Row], Any]) -> Callable[[Request], Awaitable[Any]]:
        """A route that calls the guard in a thread."""

        async def route(request: Request) -> Any:
            try:
                return _plain(await asyncio.to_thread(call, await _body(request)))
            except KeyError as error:
                raise HTTPException(422, f"The JSON object lacks {error}.") from error
            except (ValueError, TypeError, RuntimeError) as error:
                raise HTTPException(422, str(error)) from error

        route.__annotations__ = {"request": Request, "return": Any}
        return route

    app.get("/promise")(called(lambda _: guard.report().to_dict()))
    app.post("/ask")(called(lambda body: {"rows": guard.ask(body["budget"]).tolist()}))
    app.post("/labels")(called(lambda body: guard.update(body["rows"], body["labels"]).to_dict()))
    app.post("/recalibrate")(called(lambda _: guard.recalibrate()._asdict()))
    return app


async def _body(request: Request) -> Row:
    """The JSON object of a request; an empty one for a request without a body."""
    try:
        found = await request.json() if await request.body() else {}
    except ValueError as error:
        raise HTTPException(422, "The body is no JSON.") from error
    if not isinstance(found, dict):
        raise HTTPException(422, "Expected a JSON object.")
    return found


def _column(values: list[Any]) -> Any:
    """Lists of one length as a matrix, other values as a column."""
    return np.array(values) if all(isinstance(value, list) for value in values) else values


def _plain(value: Any) -> Any:
    """A value without NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        named = getattr(value, "_asdict", None)
        return _plain(named()) if named else [_plain(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value
