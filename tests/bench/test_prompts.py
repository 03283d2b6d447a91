import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.openai_server import TEMPLATE_TOKENS, Behaviour, count_words, fake_server
from twinfire.bench.client import Client, ServerUnusable
from twinfire.bench.prompt_builder import PromptBuilder
from twinfire.bench.prompt_source import (
    PromptSource,
    TextTooSmall,
    library_paragraphs,
    paragraphs_of,
)
from twinfire.bench.target import Target
from twinfire.bench.token_counter import calibrate


def build(behaviour, make, seed=1):
    async def scenario():
        async with fake_server(behaviour) as server, Client(Target(server.url)) as client:
            source = PromptSource(library_paragraphs(), seed)
            builder = PromptBuilder(source, await calibrate(client, source))
            return await make(builder), server

    return asyncio.run(scenario())


@pytest.mark.parametrize("shape", ["vllm", "llamacpp"])
@pytest.mark.parametrize("num_tokens", [20, 128, 3000])
def test_prompts_have_exactly_the_tokens_asked_for(shape, num_tokens):
    text, _ = build(Behaviour(tokenize=shape), lambda builder: builder.prompt(num_tokens))
    assert count_words(text) + TEMPLATE_TOKENS == num_tokens


def test_without_tokenize_two_requests_give_an_estimate():
    text, server = build(Behaviour(tokenize=None), lambda builder: builder.prompt(1000))
    assert len(server.bodies) == 2
    assert count_words(text) + TEMPLATE_TOKENS == pytest.approx(1000, rel=0.35)


def test_a_server_that_counts_nothing_is_unusable():
    with pytest.raises(ServerUnusable, match="no /tokenize"):
        build(Behaviour(tokenize=None, usage=False), lambda builder: builder.prompt(10))


def test_a_failing_server_is_unusable():
    with pytest.raises(ServerUnusable, match="http_500"):
        build(Behaviour(status=500), lambda builder: builder.prompt(10))


def test_a_tiny_length_gives_the_smallest_prompt():
    text, _ = build(Behaviour(), lambda builder: builder.prompt(1))
    assert count_words(text) == 1


def test_text_alone_leaves_the_template_out():
    text, _ = build(Behaviour(), lambda builder: builder.text(100))
    assert count_words(text) == 100


def test_a_start_is_kept_and_cut():
    async def both(builder):
        start = builder.fork("b").block(60)
        return start, await builder.prompt(400, start), await builder.prompt(30, start)

    (start, long, short), _ = build(Behaviour(), both)
    assert long.startswith(start)
    assert start.startswith(" ".join(short.split(" ")[:10]))
    assert count_words(short) + TEMPLATE_TOKENS == 30


def test_prompts_share_no_beginning_and_repeat_with_the_seed():
    async def several(builder):
        return [await builder.prompt(64) for _ in range(20)]

    first, _ = build(Behaviour(), several, seed=5)
    again, _ = build(Behaviour(), several, seed=5)
    other, _ = build(Behaviour(), several, seed=6)
    assert first == again
    assert len({text[:24] for text in first + other}) == 40


PARAGRAPHS = tuple(f"paragraph number {index}" for index in range(7))


@settings(max_examples=30)
@given(st.integers(), st.lists(st.integers(1, 100), min_size=1, max_size=20))
def test_a_source_uses_every_paragraph_before_any_twice(seed, sizes):
    source = PromptSource(PARAGRAPHS, seed)
    taken = [part for size in sizes for part in source.take(size).split("\n\n")]
    for start in range(0, len(taken) - len(taken) % 7, 7):
        assert sorted(taken[start : start + 7]) == sorted(PARAGRAPHS)


def test_the_librarys_text_is_large():
    paragraphs = library_paragraphs()
    assert sum(map(len, paragraphs)) > 1_000_000
    assert len(set(paragraphs)) == len(paragraphs)


def test_text_comes_from_files_and_folders(tmp_path):
    (tmp_path / "a.txt").write_text("word " * 30 + "\n\n" + "other " * 30 + "\n\nshort")
    assert paragraphs_of(tmp_path) == paragraphs_of(tmp_path / "a.txt")
    assert len(paragraphs_of(tmp_path)) == 2
    with pytest.raises(TextTooSmall, match="no such file"):
        paragraphs_of(tmp_path / "missing")
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(TextTooSmall, match="no paragraph"):
        paragraphs_of(tmp_path)
