"""A web server around a program, or around a posterior that is corrected while it runs."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from net2gp.errors import InputError, Net2GPError, check_count
from net2gp.inputs import describe
from net2gp.posteriors.posterior import Posterior
from net2gp.serving.batching import Batch, Batcher
from net2gp.serving.live import Live
from net2gp.serving.loading import Program

try:
    from fastapi import FastAPI, Request, Response
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException
except ImportError as missing:
    raise ImportError("the server needs FastAPI: pip install 'net2gp[serve]'.") from missing

NPZ = "application/x-npz"

__all__ = ["NPZ", "Limits", "create_app"]

LOG = logging.getLogger("net2gp.serving")


@dataclass(frozen=True)
class Limits:
    """What a server takes.

    Args:
        points: The most points of a request.
        megabytes: The largest body of a request.
        together: The most points of one pass.
        corrections: The most corrections that are held at a time.
    """

    points: int = 1024
    megabytes: int = 16
    together: int = 256
    corrections: int = 1000

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_count(value, name)


ENDPOINTS = "GET /health, POST /predict, POST /correct and DELETE /correct/{number}"


class Refused(Exception):
    """A request that is answered with a status and a plain message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def create_app(served: Program | Posterior[Any], limits: Limits | None = None) -> FastAPI:
    """Return the server as an application for uvicorn.

    - `GET /health` says that it runs, and what it serves.
    - `POST /predict` takes `{"x": [[…], …]}`, or an npz file with the inputs by name
      (`Content-Type: application/x-npz`), and answers in the same form.
    - `POST /correct` takes `{"x": …, "y": …}` and answers `{"correction": number}`; `DELETE
      /correct/{number}` takes the correction back. Both need a posterior, not a program, and run one at a
      time in a thread beside the predictions, which see the posterior before or after them.

    A bad request has the status 400, 404, 405, 409 or 413 and `{"error": message}`.

    Args:
        served: What `net2gp.serving.load` or `net2gp.load` returned.
        limits: The limits of requests.

    Returns:
        The application: `uvicorn.run(create_app(program), host="127.0.0.1")`.

    Raises:
        InputError: If `served` is something else.
    """
    limits = limits or Limits()
    if not isinstance(served, Program | Posterior):
        raise InputError(
            "create_app serves net2gp.serving.load(path) or a posterior, but got "
            f"{describe(served)}."
        )
    source = _OfProgram(served) if isinstance(served, Program) else _OfPosterior(served)
    batcher = Batcher(source.run, limits.together)
    app = FastAPI(title="net2gp", docs_url=None, redoc_url=None)
    app.state.batcher = batcher

    _answer_errors(app)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", **source.about()}

    @app.post("/predict")
    async def predict(request: Request) -> Response:
        async def answer() -> Response:
            x = source.named(await _body(request, limits), limits)
            found = await batcher(x)
            return _response(found, npz=_is_npz(request))

        return await _plainly(answer)

    @app.post("/correct")
    async def correct(request: Request) -> Response:
        async def answer() -> Response:
            number = await asyncio.to_thread(source.correct, await _body(request, limits), limits)
            return JSONResponse({"correction": number})

        return await _plainly(answer)

    @app.delete("/correct/{number}")
    async def undo(number: str) -> Response:
        async def answer() -> Response:
            await asyncio.to_thread(source.undo, number)
            return JSONResponse({"undone": int(number)})

        return await _plainly(answer)

    return app


def _answer_errors(app: FastAPI) -> None:
    """Give errors outside of the endpoints the form of those inside."""

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": "the server failed; its log says why."}, 500)

    @app.exception_handler(HTTPException)
    async def nowhere(request: Request, error: HTTPException) -> JSONResponse:
        place = f"{request.method} {request.url.path}"
        text = f"{place}: {error.detail}. There are {ENDPOINTS}."
        return JSONResponse({"error": text}, error.status_code, error.headers)


async def _plainly(answer: Callable[[], Awaitable[Response]]) -> Response:
    """The answer, or the message of what is wrong with the request, without a traceback."""
    try:
        return await answer()
    except Refused as refused:
        return JSONResponse({"error": str(refused)}, refused.status)
    except Net2GPError as error:
        return JSONResponse({"error": str(error)}, 400)
    except Exception:
        LOG.exception("a request failed")
        return JSONResponse({"error": "the server failed; its log says why."}, 500)


def _is_npz(request: Request) -> bool:
    return request.headers.get("content-type", "").partition(";")[0].strip() == NPZ


async def _body(request: Request, limits: Limits) -> dict[str, Any]:
    """The arrays of a request by name, read no further than the limit."""
    most, data = limits.megabytes * 2**20, bytearray()
    async for part in request.stream():
        data += part
        if len(data) > most:
            raise Refused(413, f"a request has at most {limits.megabytes} MB.")
    if _is_npz(request):
        return _arrays(bytes(data), most)
    try:
        found = json.loads(bytes(data))
    except (ValueError, RecursionError):
        raise Refused(400, 'the body is no JSON. Send {"x": [[...], ...]}.') from None
    if not isinstance(found, dict) or not found:
        raise Refused(400, 'the body must be an object such as {"x": [[...], ...]}.')
    return found


def _arrays(data: bytes, most: int) -> dict[str, Any]:
    """The arrays of an npz file, never unpickled; their unpacked size is limited as well."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            size = sum(one.file_size for one in archive.zip.infolist())
            if size > most:
                raise Refused(413, f"the arrays of a request have at most {most >> 20} MB.")
            return {name: archive[name] for name in archive.files}
    except Refused:
        raise
    except Exception:
        raise Refused(400, "the body is no npz file of numbers.") from None


def _tensor(name: str, value: Any, dtype: torch.dtype) -> Tensor:
    kinds = "fiub" if dtype.is_floating_point else "iub" if dtype == torch.bool else "iu"
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.asarray(None)
    if array.dtype.kind not in "fiub":
        raise Refused(400, f"{name} must be an array of numbers with rows of one length.")
    if array.dtype.kind not in kinds:
        raise Refused(400, f"{name} must hold whole numbers.")
    tensor = torch.from_numpy(array.astype(np.float64 if dtype.is_floating_point else np.int64))
    tensor = tensor.to(dtype)
    if not bool(torch.isfinite(tensor).all()):
        raise Refused(400, f"{name} must be finite, but has NaN or infinite entries in {dtype}.")
    if not dtype.is_floating_point and not (tensor.numpy() == array).all():
        raise Refused(400, f"{name} has whole numbers that {dtype} cannot hold.")
    return tensor


def _response(found: Batch, *, npz: bool) -> Response:
    if not all(bool(torch.isfinite(value).all()) for value in found.values()):
        raise Refused(400, "the prediction of these points is not finite: they are too large.")
    if not npz:
        return JSONResponse({name: value.tolist() for name, value in found.items()})
    whole = io.BytesIO()
    arrays: dict[str, Any] = {name: value.numpy() for name, value in found.items()}
    np.savez(whole, **arrays)
    return Response(whole.getvalue(), media_type=NPZ)


def _count(x: Tensor, limits: Limits) -> None:
    if x.dim() and len(x) > limits.points:
        raise Refused(413, f"a request has at most {limits.points} points, but has {len(x)}.")


class _OfProgram:
    """Answers of a program."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def about(self) -> dict[str, Any]:
        return {"serves": self.program.facts}

    def named(self, body: dict[str, Any], limits: Limits) -> Batch:
        kinds = self.program.facts["inputs"]
        if set(body) != set(kinds):
            raise Refused(400, f"the body must have {', '.join(kinds)}, but has {', '.join(body)}.")
        x = {n: _tensor(n, body[n], getattr(torch, kinds[n][0])) for n in kinds}
        for value in x.values():
            _count(value, limits)
        return self.program.named(x)

    def run(self, x: Batch) -> Batch:
        return self.program.run(x)

    def correct(self, body: dict[str, Any], limits: Limits) -> int:
        raise Refused(
            409, "a program cannot be corrected. Serve a posterior: create_app(net2gp.load(path))."
        )

    def undo(self, number: str) -> None:
        raise Refused(409, "a program has no corrections.")


class _OfPosterior:
    """Answers of a posterior, with corrections."""

    def __init__(self, posterior: Posterior[Any]) -> None:
        if not isinstance(posterior.x, Tensor) or posterior.y is None:
            raise InputError(
                "a posterior that is served holds its data, and its inputs are one tensor. Export it with "
                "net2gp.serving.export, and serve the program."
            )
        self.live, self.like, self.targets = Live(posterior), posterior.x, posterior.y
        self.lock = threading.Lock()

    def about(self) -> dict[str, Any]:
        shape = ["N", *self.like.shape[1:]]
        serves = {"kind": "posterior", "inputs": {"x": [str(self.like.dtype)[6:], shape]}}
        return {"serves": serves, "corrections": sorted(self.live.corrections)}

    def named(self, body: dict[str, Any], limits: Limits) -> Batch:
        if set(body) != {"x"}:
            raise Refused(400, f"the body must have x, but has {', '.join(body)}.")
        return {"x": self._points(body["x"], limits)}

    def run(self, x: Batch) -> Batch:
        return self.live.answers(x["x"])

    def correct(self, body: dict[str, Any], limits: Limits) -> int:
        if set(body) != {"x", "y"}:
            raise Refused(400, f"a correction must have x and y, but has {', '.join(body)}.")
        x, y = self._points(body["x"], limits), _tensor("y", body["y"], self.targets.dtype)
        if y.dim() == 0 or len(y) != len(x):
            raise Refused(400, f"y must have {len(x)} rows, as x has.")
        with self.lock:
            if len(self.live.corrections) >= limits.corrections:
                raise Refused(409, f"{limits.corrections} corrections are held already. Undo some.")
            try:
                return self.live.correct(x, y)
            except AttributeError as error:  # NotAvailable
                raise Refused(409, str(error)) from None

    def undo(self, number: str) -> None:
        with self.lock:
            if number not in map(str, self.live.corrections):
                raise Refused(404, f"there is no correction {number[:20]}.")
            self.live.undo(int(number))

    def _points(self, value: Any, limits: Limits) -> Tensor:
        x = _tensor("x", value, self.like.dtype)
        _count(x, limits)
        if x.dim() != self.like.dim() or x.shape[1:] != self.like.shape[1:] or not len(x):
            sizes = ", ".join(["N", *map(str, self.like.shape[1:])])
            raise Refused(400, f"x must have the shape ({sizes}), but has {tuple(x.shape)}.")
        return x
