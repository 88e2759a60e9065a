# SPDX-License-Identifier: Apache-2.0
"""What is known about the values of a tensor without reading it."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional


class Statistics(NamedTuple):
    """Counts of the values of a tensor (`Tensor.stats`). A complex element counts as two values."""

    count: int  # type: ignore[assignment]  # In the place of tuple.count.
    zeros: int
    nan: int
    posinf: int
    neginf: int
    absmax: Optional[float]
    """The largest magnitude of the finite values; None: no value is finite."""

    @classmethod
    def of(cls, found: Any) -> Optional[Statistics]:
        """From tm_value_statistics; None: not known."""
        if not found.known:
            return None
        absmax = found.absmax if found.has_absmax else None
        return cls(found.count, found.zeros, found.nan, found.posinf, found.neginf, absmax)
