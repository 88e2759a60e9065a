# SPDX-License-Identifier: Apache-2.0
"""What this package raises."""

from __future__ import annotations


class Error(Exception):
    """Whatever this package fails with."""


class LayoutError(Error, ValueError):
    """What was given is not a sound layout, or cannot be stored as it is."""


class UnsupportedError(Error, TypeError):
    """A kind of value or memory that cannot be stored or filled; the message names it."""
