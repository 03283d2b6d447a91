"""`POST /v1/embeddings`: texts as vectors of length 1."""

from __future__ import annotations

from array import array
from base64 import b64encode
from collections.abc import Sequence
from contextlib import aclosing

import msgspec
import numpy as np
import numpy.typing as npt

from twinfire.gateway.dialects.embeddings_requests import (
    Embedding,
    EmbeddingsRequest,
    EmbeddingsResponse,
    EmbeddingsUsage,
)
from twinfire.gateway.dialects.generate import billed, checked_cache_salt, start_generation
from twinfire.gateway.dialects.json_body import decode_body
from twinfire.gateway.dialects.prompts import (
    TextOrIds,
    completion_prompts,
    output_bound,
    prompt_ids,
)
from twinfire.gateway.dialects.renamed_fields import renamed
from twinfire.gateway.dialects.request_headers import show_route
from twinfire.gateway.dialects.requests import CompletionRequest
from twinfire.gateway.exchange import Exchange
from twinfire.gateway.gateway import Gateway
from twinfire.gateway.hosted_model import ReadyModel
from twinfire.gateway.text.choice_text import TextDelta, TextOptions
from twinfire.gateway.text.stop_strings import StopStrings
from twinfire.gateway.text_generation import GenerationJob, PromptReady, TextGeneration
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.pooling import Pooling
from twinfire.protocol.sampling import SamplingParams

_NAMES = {"prompt": "input"}
"""What a completion calls its texts, and this dialect."""
_ROWS_A_CHAR = 4
"""Writing a number takes about as long as tokenising so many characters."""


class Embeddings:
    """The handler."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._decoder = msgspec.json.Decoder(EmbeddingsRequest)

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request."""
        request = decode_body(exchange.body, self._decoder)
        model = self._gateway.ready_model(request.model)
        pooling = _pooling(request, model)
        try:
            prompts = await self._prompts(request, model)
        except InvalidRequest as error:
            raise renamed(error, _NAMES, {}) from None
        job = GenerationJob(
            prompts=prompts,
            sampling=[SamplingParams(max_tokens=0, seed=0, pooling=pooling)] * len(prompts),
            text=TextOptions(StopStrings([])),
            priority=request.priority or 0,
            cache_salt=checked_cache_salt(request, self._gateway.settings.limits),
        )
        generation = await start_generation(self._gateway, model, exchange, request, job)
        vectors = await _vectors(exchange, generation, len(prompts))
        body = await self._gateway.handle_text(
            len(prompts) * model.text.config.hidden_size * _ROWS_A_CHAR,
            _encoded,
            request,
            model,
            vectors,
            sum(map(len, prompts)),
        )
        await exchange.answer(body)

    async def _prompts(self, request: EmbeddingsRequest, model: ReadyModel) -> list[array[int]]:
        as_completion = CompletionRequest(
            prompt=request.input,
            add_special_tokens=request.add_special_tokens,
            truncate_prompt_tokens=request.truncate_prompt_tokens,
            truncation_side=request.truncation_side or "right",
        )
        inputs = completion_prompts(as_completion, self._gateway.settings.limits)
        return [await self._one_prompt(one, as_completion, model) for one in inputs]

    async def _one_prompt(
        self, text: TextOrIds, request: CompletionRequest, model: ReadyModel
    ) -> array[int]:
        ids = await self._gateway.handle_text(len(text), prompt_ids, text, request, model, 0)
        output_bound(len(ids), 0, model, default=None, param="prompt", prompt_param="prompt")
        return ids


def _pooling(request: EmbeddingsRequest, model: ReadyModel) -> Pooling:
    config = model.text.config
    if config.pooling is None:
        raise InvalidRequest(
            f"`model` is `{model.name}`, which generates text; it embeds none.", "model"
        )
    if request.stream:
        raise InvalidRequest("`stream` is not available for embeddings.", "stream")
    if request.dimensions is not None and request.dimensions > config.hidden_size:
        raise InvalidRequest(
            f"`dimensions` is {request.dimensions}; the model has {config.hidden_size}.",
            "dimensions",
        )
    return config.pooling


class _NoText:
    """An embedding has none."""

    def is_ready(self) -> bool:
        """Always."""
        return True

    def take(self, delta: TextDelta) -> None:
        """The end of a prompt."""


async def _vectors(
    exchange: Exchange, generation: TextGeneration, num_prompts: int
) -> list[npt.NDArray[np.float32]]:
    vectors = [np.empty(0, np.float32)] * num_prompts
    async with billed(exchange), aclosing(generation.events(_NoText())) as events:
        async for event in events:
            if isinstance(event, PromptReady):
                show_route(exchange, generation.route)
                vectors[event.prompt_index] = np.frombuffer(event.embedding, "<f4")
    return vectors


def _encoded(
    request: EmbeddingsRequest,
    model: ReadyModel,
    vectors: Sequence[npt.NDArray[np.float32]],
    num_tokens: int,
) -> bytes:
    data: list[Embedding] = []
    for index, vector in enumerate(vectors):
        shown = normed(vector[: request.dimensions])
        if request.encoding_format == "base64":
            data.append(Embedding(index, b64encode(shown.tobytes()).decode()))
        else:
            data.append(Embedding(index, shown.tolist()))
    usage = EmbeddingsUsage(num_tokens, num_tokens)
    return msgspec.json.encode(EmbeddingsResponse(data, model.name, usage))


def normed(vector: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the vector at length 1; one without a length stays as it is."""
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return vector if length == 0.0 else (vector / length).astype("<f4")
