"""The script pool uses nodes that a site's command lists, for batch systems that BFTrainer does not know."""

from bftrainer.cluster.pools.script.pool import START, ScriptPool, ScriptSettings

__all__ = ["START", "ScriptPool", "ScriptSettings"]
