"""What requests cost."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinfire.accounts.prices import FREE, ModelPrice, money, nanos_of, read_price_file
from twinfire.protocol.errors import InvalidRequest

FILE = """
[prices."@cf/moonshotai/kimi-k2.5"]
input = 0.60
cached_input = 0.10
output = 3

[prices."*"]
input = 1
output = 2
"""


def test_a_file_of_prices(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(FILE)
    table = read_price_file(path)
    kimi = table.of("alias", "@cf/moonshotai/kimi-k2.5")
    assert kimi.nanos(1_000_000, 0, 0) == 600_000_000
    assert kimi.nanos(1_000_000, 1_000_000, 1_000_000) == 3_100_000_000
    assert kimi.nanos(22_500, 22_400, 7) == 60_000 + 2_240_000 + 21_000
    assert table.of("other").nanos(10, 5, 10) == 30_000
    assert [(p.unit, p.price) for p in table.catalogue("@cf/moonshotai/kimi-k2.5")] == [
        ("per M input tokens", 0.6),
        ("per M cached input tokens", 0.1),
        ("per M output tokens", 3.0),
    ]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[prices.a]\ninput = -1", r"prices\.a\.input is -1"),
        ("[prices.a]\noutput = nan", r"prices\.a\.output"),
        ("[prices.a]\ncache_input = 1", "cache_input"),
        ("[prices.a]\ninput = 'x'", "input"),
        ("prices", "not TOML"),
    ],
)
def test_wrong_files_name_the_field(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=named):
        read_price_file(path)
    with pytest.raises(InvalidRequest, match="No such file"):
        read_price_file(tmp_path / "none.toml")


def test_nothing_costs_nothing() -> None:
    assert FREE.nanos(10**9, 0, 10**9) == 0


@given(st.integers(-(10**18), 10**18))
def test_money_is_exact_both_ways(nanos: int) -> None:
    assert nanos_of(money(nanos)) == nanos


@given(st.integers(0, 10**7), st.integers(0, 10**7), st.decimals(0, 1000, places=4))
def test_cached_tokens_never_cost_more(num_input: int, num_output: int, price: Decimal) -> None:
    model = ModelPrice(input=price, cached_input=price / 2, output=price)
    whole = model.nanos(num_input, 0, num_output)
    assert model.nanos(num_input, num_input, num_output) <= whole
    assert abs(whole - (num_input + num_output) * price * 1000) <= 1


@pytest.mark.parametrize("text", ["x", "nan", "inf", "0.0000000001", ""])
def test_what_is_no_money(text: str) -> None:
    with pytest.raises(InvalidRequest):
        nanos_of(text)
