"""What tests of frameworks share: whether a framework is installed, and what their workers import before they start."""

from __future__ import annotations

import importlib.util

import pytest

HUGGING_FACE = (
    "transformers.trainer",
    "transformers.models.gpt2.modeling_gpt2",
    "bftrainer.integrations.accelerate",
    "bftrainer.integrations.transformers",
)
"""One warm parent serves the tests of Transformers and of Accelerate: importing them takes longer than the tests."""


def needs(*packages: str) -> None:
    """Skip the tests of a module without these packages. They are not imported: only the workers use them."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs the package {package}", allow_module_level=True)
