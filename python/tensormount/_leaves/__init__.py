# SPDX-License-Identifier: Apache-2.0
"""Kinds of tensors in state dicts: NumPy arrays, PyTorch tensors and DTensors, tensors that describe themselves,
`Shards`, JAX arrays, and registered kinds.

Each kind is a class (`base.py`), which `registry.py` finds by the type of a leaf. A framework is imported only
if there are leaves of it.
"""

from tensormount._leaves import registry
from tensormount._leaves.arrays import NumpyKind
from tensormount._leaves.base import LeafKind, ObjectPart
from tensormount._leaves.dtensors import DTensorKind
from tensormount._leaves.parts import JaxKind, ShardedTensorKind, ShardsKind
from tensormount._leaves.registry import register_leaf_kind
from tensormount._leaves.tensors import SelfDescribingKind, TensorKind

__all__ = ["LeafKind", "ObjectPart", "register_leaf_kind"]

# The kind of a subclass comes before the kind of its base class.
registry.BUILT_IN = (
    NumpyKind(), DTensorKind(), SelfDescribingKind(), ShardedTensorKind(), TensorKind(), ShardsKind(), JaxKind(),
)
