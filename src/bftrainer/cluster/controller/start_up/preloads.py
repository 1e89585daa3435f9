"""Preloads: what each script imports, learned from its workers, so that agents can import it ahead.

`JobRunner` passes in what workers said at their first step and adds the modules to their `Start`; `preparing.py` tells
agents that have no worker of the script yet. Everything learned is in the store, so it outlives the controller.
"""

from __future__ import annotations

from bftrainer.cluster.spec.trainer import NO_PRELOAD, TrainerSpec
from bftrainer.cluster.store.preloads import Script, ScriptImports, bounded
from bftrainer.cluster.store.store import Store
from bftrainer.elastic.protocol import FirstStep, PreloadRefused

WORTH_S = 0.2
"""Seconds of imports that are worth to be done ahead. Whatever is added makes all agents import everything again."""


class Preloads:
    """The modules to import ahead, by script."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known = store.preloads.all()

    def of(self, spec: TrainerSpec, owner: str = "") -> tuple[str, ...]:
        """Return the modules to import ahead for a trainer: those its user named, then those that were learned."""
        if spec.preload == (NO_PRELOAD,):
            return ()
        known = self._known.get(_script(spec, owner), ScriptImports())
        wanted = dict.fromkeys((*spec.preload, *known.modules))
        return tuple(name for name in wanted if name not in known.left_out)

    def learn(self, spec: TrainerSpec, first_step: FirstStep, now: float, owner: str = "") -> None:
        """Add what a worker imported that was not imported ahead for it."""
        known = self._known.get(_script(spec, owner), ScriptImports())
        new = {name: seconds for name, seconds in first_step.modules.items() if name not in known.modules}
        if sum(new.values()) >= WORTH_S:
            self._keep(_script(spec, owner), ScriptImports(bounded({**known.modules, **new}), known.left_out), now)

    def refused(self, spec: TrainerSpec, refused: PreloadRefused, now: float, owner: str = "") -> None:
        """Leave out modules from now on, because the script changes what they depend on before it imports them."""
        known = self._known.get(_script(spec, owner), ScriptImports())
        left_out = tuple(dict.fromkeys((*known.left_out, *refused.modules)))
        if left_out != tuple(known.left_out):
            self._keep(_script(spec, owner), ScriptImports(known.modules, left_out), now)

    def _keep(self, script: Script, imports: ScriptImports, now: float) -> None:
        self._known[script] = imports
        self._store.preloads.put(script, imports, now)


def _script(spec: TrainerSpec, owner: str) -> Script:
    """Return under what a script is known. Where agents have owners, no owner learns from another's."""
    where, python = spec.identity
    return (f"{owner}: {where}", python) if spec.signature else (where, python)
