"""Scaling curves of the seven ImageNet models on Summit, as printed in the paper's Table 2.

Samples per second with a minibatch of 32 per GPU, rounded to a hundred. Used where no measured curves are given.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from bftrainer.core.curve import Curve

_NODES = (1, 2, 4, 8, 16, 32, 64)
_THOUSANDS = {
    "AlexNet": (7.1, 13.1, 21.1, 40.5, 74.0, 130.8, 202.1),
    "ResNet18": (5.2, 10.6, 20.4, 39.6, 78.0, 144.8, 262.7),
    "MnasNet": (3.2, 6.0, 11.5, 23.1, 43.9, 83.5, 160.5),
    "MobileNets": (3.0, 5.9, 11.4, 22.0, 42.5, 82.3, 155.2),
    "ShuffleNet": (2.8, 5.3, 10.0, 20.4, 38.9, 74.1, 145.1),
    "VGG-16": (1.2, 2.4, 4.7, 9.3, 18.3, 36.2, 70.2),
    "DenseNet": (1.0, 2.0, 3.8, 7.6, 15.0, 28.8, 57.8),
}

PAPER_CURVES: Mapping[str, Curve] = MappingProxyType(
    {name: Curve.through(_NODES, [1000 * rate for rate in rates], name) for name, rates in _THOUSANDS.items()}
)
