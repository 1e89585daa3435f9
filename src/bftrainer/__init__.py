"""BFTrainer trains neural networks on the nodes that a supercomputer's batch scheduler cannot fill."""

__version__ = "0.1.0"

_CLIENTS = ("AsyncClient", "Client")


def __getattr__(name):  # type: ignore[no-untyped-def] # typed in __init__.pyi
    """Load the clients of the live system on first use: a training script needs none of them."""
    if name not in _CLIENTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    try:
        return getattr(importlib.import_module("bftrainer.client"), name)
    except ModuleNotFoundError as problem:
        if (problem.name or "bftrainer").partition(".")[0] == "bftrainer":
            raise
        raise ImportError(f"bftrainer.{name} needs the package {problem.name}: pip install 'bftrainer[live]'") from None


def __dir__():  # type: ignore[no-untyped-def]
    """All public names, the clients included."""
    return sorted({*globals(), *_CLIENTS})
