"""Which reader understands which format."""

from __future__ import annotations

import secrets
import string

from twinfire.gateway.text.answer_sink import MakeId, call_id
from twinfire.gateway.text.answer_splitter import ReadAnswer
from twinfire.gateway.text.tool_formats.deepseek import read_deepseek
from twinfire.gateway.text.tool_formats.hermes import read_hermes
from twinfire.gateway.text.tool_formats.kimi_k2 import SECTION_BEGIN, read_kimi_k2
from twinfire.gateway.text.tool_formats.llama3_json import read_llama3_json
from twinfire.gateway.text.tool_formats.mistral import read_mistral
from twinfire.gateway.text.tool_formats.qwen3_coder import read_qwen3_coder
from twinfire.gateway.text.tool_formats.tool_format import ToolFormat, ToolFormatName

READERS: dict[ToolFormatName, ReadAnswer] = {
    "hermes": read_hermes,
    "llama3_json": read_llama3_json,
    "mistral": read_mistral,
    "mistral_v11": read_mistral,
    "deepseek_v3": read_deepseek,
    "deepseek_v31": read_deepseek,
    "kimi_k2": read_kimi_k2,
    "qwen3_coder": read_qwen3_coder,
}
MISTRAL_ID_CHARS = 9
_ALPHANUMERIC = string.ascii_letters + string.digits


def id_maker(tool_format: ToolFormat) -> MakeId:
    """Return what makes ids that the format's chat templates take back."""
    return _mistral_id if tool_format.name.startswith("mistral") else call_id


def reasoning_also_ends_at(tool_format: ToolFormat) -> str | None:
    """Return what opens calls in the midst of reasoning, where models do that."""
    return SECTION_BEGIN if tool_format.name == "kimi_k2" else None


def _mistral_id() -> str:
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(MISTRAL_ID_CHARS))
