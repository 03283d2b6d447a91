"""The `prediction` of a chat request as token ids for the drafter.

Nothing here can change an answer: drafts that are wrong are only rejected.
"""

from __future__ import annotations

from twinfire.gateway.dialects.conversation import part_text
from twinfire.gateway.dialects.prompts import TOO_LONG, encode_text
from twinfire.gateway.dialects.requests import Prediction
from twinfire.gateway.gateway import Gateway
from twinfire.gateway.hosted_model import ReadyModel
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.tokens import pack_ids

_PARAM = "prediction.content"


async def predicted_output(
    gateway: Gateway, prediction: Prediction | None, model: ReadyModel
) -> bytes:
    """Return the prediction as u32 ids, empty for none.

    InvalidRequest for parts that are not text and for more than the model's context holds.
    """
    if prediction is None:
        return b""
    text = _text(prediction)
    return await gateway.handle_text(len(text), _packed_ids, text, model)


def _text(prediction: Prediction) -> str:
    content = prediction.content
    if isinstance(content, str):
        return content
    return "".join(
        part_text(part, f"{_PARAM}[{position}]") for position, part in enumerate(content)
    )


def _packed_ids(text: str, model: ReadyModel) -> bytes:
    ids = encode_text(text, model, add_special_tokens=False, may_be_long=False, param=_PARAM)
    if len(ids) > model.max_model_len:
        raise InvalidRequest(
            f"`{_PARAM}` has {len(ids)} tokens; the model's context is {model.max_model_len} "
            "tokens, prompt and output together.",
            _PARAM,
            TOO_LONG,
        )
    return pack_ids(ids)
