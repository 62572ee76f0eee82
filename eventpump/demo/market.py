"""A simulated market: trades of a few dozen symbols, the same for the same seed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

_SYMBOLS = {
    "AAPL": 212.4, "ABBV": 171.9, "ADBE": 548.2, "AMD": 158.8, "AMZN": 186.5, "AVGO": 166.2, "BAC": 41.3, "BRKB": 436.7,
    "COST": 852.1, "CRM": 255.3, "CSCO": 47.6, "CVX": 156.8, "DIS": 96.4, "GOOG": 182.7, "HD": 357.9, "INTC": 34.2,
    "JNJ": 151.3, "JPM": 208.6, "KO": 64.7, "LLY": 889.4, "MA": 442.8, "MCD": 254.1, "META": 504.2, "MRK": 127.5,
    "MSFT": 447.3, "NFLX": 674.9, "NVDA": 121.8, "ORCL": 141.6, "PEP": 165.2, "PFE": 28.1, "PG": 167.4, "TMO": 553.7,
    "TSLA": 246.4, "TXN": 198.3, "UNH": 497.6, "V": 265.9, "VZ": 41.1, "WFC": 58.3, "WMT": 68.9, "XOM": 114.6,
}  # fmt: skip
"""Symbols and their opening prices."""

_VENUES = ("XNAS", "XNYS", "ARCX", "BATS", "IEXG")


@dataclass(frozen=True, slots=True)
class Trade:
    """One trade; its id is unique in the market, which makes every encoded trade unique."""

    trade_id: int
    symbol: str
    price: float
    size: int
    side: str
    venue: str
    time: datetime

    def encode(self) -> bytes:
        """Return the trade as JSON."""
        return json.dumps(
            {
                "id": self.trade_id,
                "symbol": self.symbol,
                "price": self.price,
                "size": self.size,
                "side": self.side,
                "venue": self.venue,
                "time": self.time.isoformat(timespec="microseconds"),
            },
            separators=(",", ":"),
        ).encode()


def trades(seed: int) -> Iterator[Trade]:
    """Yield trades endlessly: prices follow a random walk, and busy symbols trade more."""
    rng = random.Random(seed)
    prices = dict(_SYMBOLS)
    symbols = list(prices)
    weights = [1.0 / (rank + 3) for rank in range(len(symbols))]
    rng.shuffle(weights)
    moment = datetime(2026, 1, 5, 14, 30, tzinfo=UTC)
    number = 0
    while True:
        for symbol in rng.choices(symbols, weights, k=256):
            number += 1
            moment += timedelta(microseconds=rng.randrange(1, 400))
            prices[symbol] = max(1.0, prices[symbol] * (1 + rng.gauss(0, 0.0002)))
            yield Trade(
                number,
                symbol,
                round(prices[symbol], 2),
                rng.choice((1, 10, 50, 100, 100, 100, 200, 500)),
                rng.choice(("buy", "sell")),
                rng.choice(_VENUES),
                moment,
            )
