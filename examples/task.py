"""What the Python examples ask for: a question, a tool, a shape and a long prompt.

Answers are kept short and bounded, so that the smallest of models gets to the end of them.
"""

from __future__ import annotations

import json
import uuid
from typing import Annotated, Literal

from pydantic import BaseModel, Field

QUESTION = "What is the capital of France? Answer in one sentence."
TOOL_QUESTION = "What is the weather in Paris?"
SHAPE_QUESTION = "Describe a person named Ada as JSON."
MAX_TOKENS = 40

City = Literal["Paris", "London", "Seoul"]


class Person(BaseModel):
    """A person, with bounds that keep a small model from writing without end."""

    name: Annotated[str, Field(max_length=12)]
    age: Annotated[int, Field(ge=0, le=120)]


class WeatherQuery(BaseModel):
    """The arguments of the tool `get_weather`."""

    city: City


def get_weather(city: City) -> str:
    """Get the weather of a city."""
    return json.dumps({"city": city, "sky": "clear", "celsius": 21})


WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": WeatherQuery.model_json_schema(),
    },
}


def long_prompt() -> str:
    """Return some 700 tokens that no server has seen before, so that a cache hit is our own."""
    lines = [f"Ferry {n} leaves pier {n % 7} at {n % 24}:{n % 6}0." for n in range(40)]
    return f"Timetable {uuid.uuid4()}. Answer briefly.\n" + "\n".join(lines)
