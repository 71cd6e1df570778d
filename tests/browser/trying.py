"""A small server with the addresses of `multihead try`, whose answers are made up but fit together."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route

from multihead import masks
from multihead.errors import ArgumentError, MultiheadError
from multihead.observation.record import Record
from multihead.record.texts import Text
from multihead.viewer.payload import RecordedRun, describe_sample
from multihead.viewer.responses import error_response, file_response, floats_response, try_page_response
from multihead.viewer.security import AccessGuard, allowed_hosts, json_response
from tests.viewer.serving import TOKEN
from tests.viewer.watching import watch

TEXT = "Dr. Imogen Vassilakis found the key under the door. Nobody had seen it before. The next morning Dr. Imogen"
SENTENCES = "A man plays a guitar.\nSomebody makes music.\nThe stock market fell.\nPrices dropped in the city."
WORDS = [" V", " K", " was", " had", " said", " D", " found", " and", " P", " went", " M", " looked", ",", " B"]
SHAPES = {"language": (30, 9), "encoder": (6, 12)}


def pieces(text: str) -> list[str]:
    found: list[str] = []
    for word in text.replace("\n", " \n").split(" "):
        found += [(" " if found else "") + word[:4], *([word[4:]] if len(word) > 4 else [])]
    return found


def noise(*seed: object) -> float:
    """A number from 0 to 1 that is the same for the same arguments."""
    return float(np.random.default_rng(abs(hash_of(seed)) % 2**32).random())


def hash_of(seed: tuple[object, ...]) -> int:
    return int.from_bytes(json.dumps([str(each) for each in seed]).encode()[-64:], "big") % (2**61 - 1)


class Trial:
    """The answers about one model that does not exist."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.layers, self.heads = SHAPES[kind]
        self.records: dict[str, Record] = {}
        self.lang = "en"
        self.asked: list[str] = []
        self.delay = 0.0

    def routes(self) -> list[Route]:
        names = ("model", "text", "change", "maps", "sweep", "continuation")
        return [
            Route("/", self.page),
            Route("/static/{folder}/{name}", self.static),
            *(Route(f"/api/{name}", getattr(self, name)) for name in names),
        ]

    async def page(self, request: Request) -> Response:
        self.lang = request.query_params.get("lang", "en")
        return try_page_response(self.lang)

    async def static(self, request: Request) -> Response:
        return file_response(request.path_params["folder"], request.path_params["name"])

    async def model(self, request: Request) -> Response:
        title = {"language": "SmolLM2-135M", "encoder": "all-MiniLM-L6-v2"}[self.kind]
        text = TEXT if self.kind == "language" else SENTENCES
        return json_response(
            {
                "title": title,
                "name": title,
                "version": "1",
                "lang": self.lang,
                "kind": self.kind,
                "text": text,
                "most_tokens": 200,
                "dtype": "float32",
                "layers": self.layers,
                "heads": self.layers * self.heads,
            }
        )

    def tokens(self, text: str) -> list[dict[str, Any]]:
        encoder = self.kind == "encoder"
        found = []
        for sentence, line in enumerate(text.split("\n") if encoder else [text]):
            for place, piece in enumerate(pieces(line)):
                loss = None if encoder or place == 0 else round(8 * noise("loss", place, piece) ** 3 + 0.02, 3)
                found.append({"text": piece, "special": False, "sentence": sentence, "loss": loss})
        if len(found) > 200:
            raise ArgumentError(f"The text has {len(found)} tokens, and the page takes 200.", "Give a shorter text.")
        return found

    def record(self, text: str) -> Record:
        line = text.split("\n", maxsplit=1)[0] if self.kind == "encoder" else text
        if line not in self.records:
            tokens = pieces(line)
            mask = masks.Causal() if self.kind == "language" else masks.Full()
            seen = watch(len(tokens), mask=mask, heads=self.heads, layers=self.layers)
            seen.set_text(Text(None, tokens, None))
            self.records[line] = seen
        return self.records[line]

    def similarity(self, text: str, heads: dict[tuple[int, int], float]) -> list[list[float]] | None:
        if self.kind != "encoder":
            return None
        n = len(text.split("\n"))
        off = sum(1 - factor for factor in heads.values())
        pair = lambda a, b: (
            0.2 + 0.6 * noise("pair", min(a, b), max(a, b)) - off * 0.1 * noise("by", min(a, b), max(a, b))
        )
        return [[1.0 if a == b else round(pair(a, b), 4) for b in range(n)] for a in range(n)]

    async def text(self, request: Request) -> Response:
        text = request.query_params["text"]
        tokens = self.tokens(text)
        grid = await asyncio.to_thread(lambda: describe_sample(RecordedRun("model", self.record(text)), 0, self.lang))
        induction = [[18, 6], [17, 3], [17, 4], [19, 2]] if self.kind == "language" else []
        names = ["previous", "first", "local", "broad", "mixed", "mixed", "mixed"]
        known = {each["id"] for each in grid["legend"]}
        for index in range(self.layers * self.heads):
            place = [index // self.heads, index % self.heads]
            name = names[int(noise("kind", index) * len(names))]
            kinds = [name] if name in known else ["mixed"]
            grid["kinds"][index] = ["induction", *kinds] if place in induction and "induction" in known else kinds
        encoder = self.kind == "encoder"
        return json_response(
            {
                "tokens": tokens,
                "sentences": text.split("\n") if encoder else [],
                "similarity": self.similarity(text, {}),
                "grid": grid,
                "kinds": {"induction": induction},
                "sweep_seconds": 39.6,
                "seconds": 0.8,
                "replay": True,
            }
        )

    def given(self, request: Request) -> tuple[str, dict[tuple[int, int], float]]:
        heads = {}
        for each in filter(None, request.query_params.get("heads", "").split(",")):
            name, _, factor = each.partition(":")
            layer, head = map(int, name.split("."))
            heads[layer, head] = float(factor or 0)
        if len(heads) == self.layers * self.heads and not any(heads.values()):
            raise ArgumentError("Every head of the model is off.", "Leave at least one head on.")
        return request.query_params["text"], heads

    def chances(self, heads: dict[tuple[int, int], float], at: int) -> dict[str, float]:
        scores = {word: 4 * noise("word", word, at) for word in WORDS}
        scores[" V"] += 3
        for (layer, head), factor in heads.items():
            scores[" V"] -= (1 - factor) * (1.4 if layer in (17, 18) and head in (3, 4, 6) else 0.05)
        total = sum(map(math.exp, scores.values())) + 20
        return {word: math.exp(score) / total for word, score in scores.items()}

    async def change(self, request: Request) -> Response:
        text, heads = self.given(request)
        self.asked.append(str(request.query_params.get("heads", "")))
        await asyncio.sleep(self.delay)
        tokens = self.tokens(text)
        at = int(request.query_params.get("at", len(tokens) - 1))
        active = {place: factor for place, factor in heads.items() if factor != 1}
        before, after = self.chances({}, at), self.chances(active, at)
        encoder = self.kind == "encoder"
        losses = [
            None
            if one["loss"] is None
            else one["loss"] + sum((1 - f) * (noise("d", p, *h) ** 4 - 0.1) for h, f in active.items())
            for p, one in enumerate(tokens)
        ]
        worse = [p for p, one in enumerate(tokens) if one["loss"] is not None and losses[p] - one["loss"] > 0.5]
        first = min((layer for layer, _ in active), default=None)
        later = range(self.layers) if first is None else range(first + 1, self.layers)
        far = {(layer, head): (noise("far", layer, head) ** 6 * 0.5) for layer in later for head in range(self.heads)}
        names = sorted(before, key=lambda word: -max(before[word], after[word]))
        return json_response(
            {
                "losses": None if encoder else losses,
                "predictions": sum(one["loss"] is not None for one in tokens),
                "worse": len(worse),
                "at": at,
                "kl": None if encoder else sum(p * math.log(p / after[w]) for w, p in before.items()),
                "next": None
                if encoder
                else [{"token": w, "id": n, "before": before[w], "after": after[w]} for n, w in enumerate(names)],
                "others": None if encoder else {"before": 1 - sum(before.values()), "after": 1 - sum(after.values())},
                "similarity": self.similarity(text, active),
                "changed": [] if not active else [[*k, far[k]] for k in sorted(far, key=lambda k: -far[k])[:5]],
                "distances": []
                if not active
                else [{"layer": n, "heads": [far[n, h] for h in range(self.heads)]} for n in later],
                "seconds": 0.42,
                "layers": None if first is None else [first, self.layers - 1],
                "whole": False,
                "why_whole": None,
            }
        )

    async def maps(self, request: Request) -> Response:
        text, _ = self.given(request)
        layer, head = (int(request.query_params[name]) for name in ("layer", "head"))
        one = self.record(text).layers[layer].sample(0)
        before = torch.where(one.visible(), one.weights(head), torch.nan).numpy()
        other = torch.where(one.visible(), one.weights((head + 1) % self.heads), torch.nan).numpy()
        return floats_response(np.stack([before, 0.6 * before + 0.4 * other]))

    async def sweep(self, request: Request) -> Response:
        at = int(request.query_params["at"])

        async def parts() -> AsyncIterator[bytes]:
            for layer in range(self.layers):
                await asyncio.sleep(0.02 + self.delay)
                effects = [
                    (-0.9 if (layer, head) == (1, 3) else 0.0) - 0.4 * (noise("e", layer, head, at) - 0.4) ** 3
                    for head in range(self.heads)
                ]
                line = {"layer": layer, "effects": effects, "done": layer + 1, "total": self.layers, "losses": None}
                yield (json.dumps(line) + "\n").encode()
            yield b'{"seconds": 38.2, "floor_seconds": 36.5, "peak_mib": 900}\n'

        return StreamingResponse(parts(), media_type="application/x-ndjson")

    async def continuation(self, request: Request) -> Response:
        _, heads = self.given(request)
        said = (
            " Vassilakis found the key under the door. She had seen it before, and she knew what it was for." * 2
        ).split(" ")[1:41]
        other = [word if n < 3 or n % 4 else "lamp" for n, word in enumerate(said)] if heads else said

        async def parts() -> AsyncIterator[bytes]:
            for word, else_word in zip(said, other, strict=True):
                await asyncio.sleep(0.01 + self.delay)
                yield (
                    json.dumps({"before": [" " + word]}) + "\n" + json.dumps({"after": [" " + else_word]}) + "\n"
                ).encode()
            yield b'{"done": true}\n'

        return StreamingResponse(parts(), media_type="application/x-ndjson")


@contextmanager
def trying(kind: str = "language") -> Iterator[str]:
    """Serve the page until the block ends; gives its address."""
    with socket.socket(proto=socket.IPPROTO_TCP) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        trial = Trial(kind)
        app = Starlette(
            routes=[Mount(f"/{TOKEN}", routes=trial.routes())],
            middleware=[Middleware(AccessGuard, token=TOKEN, hosts=allowed_hosts(port))],
            exception_handlers={MultiheadError: error_response},
        )
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", ws="none", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [taken]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{port}/{TOKEN}/"
        finally:
            server.should_exit = True
            thread.join(20)
