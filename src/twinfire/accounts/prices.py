"""What models cost: a price per million tokens for input, cached input and output.

[prices."@cf/moonshotai/kimi-k2.5"]
input = 0.60
cached_input = 0.10
output = 3.00

The model `*` is everything that has no price of its own. Money is counted in whole billionths of
the currency, so that sums over any number of requests are exact.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import ROUND_HALF_EVEN, Decimal
from pathlib import Path

import msgspec

from twinfire.protocol.errors import InvalidRequest

NANOS = 1_000_000_000
"""Billionths in one unit of the currency."""
ANY_MODEL = "*"
_PER_TOKENS = 1_000_000


class ModelPrice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prices per million tokens."""

    input: Decimal = Decimal(0)
    output: Decimal = Decimal(0)
    cached_input: Decimal | None = None
    """None charges cached tokens as all others."""

    def nanos(self, num_input: int, num_cached: int, num_output: int) -> int:
        """Return the price of a request in billionths; `num_cached` are among `num_input`."""
        cached = self.input if self.cached_input is None else self.cached_input
        money = (num_input - num_cached) * self.input + num_cached * cached
        money += num_output * self.output
        return int((money * (NANOS // _PER_TOKENS)).to_integral_value(ROUND_HALF_EVEN))


class CataloguePrice(msgspec.Struct, frozen=True):
    """One price in the shape of the public catalogue of Workers AI."""

    unit: str
    price: float
    currency: str


FREE = ModelPrice()


@dataclass(frozen=True, slots=True)
class PriceTable:
    """The prices of all models."""

    currency: str = "USD"
    prices: Mapping[str, ModelPrice] = field(default_factory=dict)

    def of(self, *names: str) -> ModelPrice:
        """Return the price of the first of a model's names that has one, else what `*` costs."""
        for name in (*names, ANY_MODEL):
            if name in self.prices:
                return self.prices[name]
        return FREE

    def catalogue(self, *names: str) -> list[CataloguePrice]:
        """Return a model's prices for a catalogue; empty where it is free."""
        price = self.of(*names)
        if price is FREE:
            return []
        shown = {"input": price.input, "cached input": price.cached_input, "output": price.output}
        return [
            CataloguePrice(f"per M {kind} tokens", float(value), self.currency)
            for kind, value in shown.items()
            if value is not None
        ]


class _PriceFile(msgspec.Struct, forbid_unknown_fields=True):
    currency: str = "USD"
    prices: dict[str, ModelPrice] = {}


def read_price_file(path: Path) -> PriceTable:
    """Return the prices of a TOML file; InvalidRequest names the field that is wrong."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"), parse_float=Decimal)
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} is not TOML: {error}") from None
    try:
        content = msgspec.convert(table, _PriceFile)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{path}: {error}") from None
    return price_table(content.currency, content.prices, str(path))


def price_table(currency: str, prices: Mapping[str, ModelPrice], where: str) -> PriceTable:
    """Return a table; InvalidRequest for a price that is none, told as found in `where`."""
    for name, price in prices.items():
        for kind in price.__struct_fields__:
            value = getattr(price, kind)
            if value is not None and not (value.is_finite() and 0 <= value < 10**6):
                raise InvalidRequest(
                    f"{where}: prices.{name}.{kind} is {value}; it must be from 0 to 999999"
                )
    return PriceTable(currency, dict(prices))


def money(nanos: int) -> str:
    """Return an amount in units of the currency, exact and without trailing zeros."""
    whole, part = divmod(abs(nanos), NANOS)
    digits = f"{part:09d}".rstrip("0")
    sign = "-" if nanos < 0 else ""
    return f"{sign}{whole}.{digits}" if digits else f"{sign}{whole}"


def nanos_of(text: str) -> int:
    """Return an amount that a person wrote, such as `2.50`, in billionths."""
    try:
        value = Decimal(text) * NANOS
    except ArithmeticError:
        raise InvalidRequest(f"`{text}` is no amount of money") from None
    if not value.is_finite() or value != value.to_integral_value():
        raise InvalidRequest(f"`{text}` is no amount of money with at most 9 decimals")
    return int(value)
