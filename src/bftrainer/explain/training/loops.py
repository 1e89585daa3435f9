"""Training loops: finds the loop that computes gradients and steps, the loop over epochs around it, and its data."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from bftrainer.explain.reading.kinds import WRAPS, Kind, kind_by_hint
from bftrainer.explain.reading.program import Loop, Program, is_loop
from bftrainer.explain.reading.reach import CallFrame, Reached, reach
from bftrainer.explain.reading.source import dotted

MOST_REPEATS = 20
"""A constant number of passes up to which an inner loop repeats steps on one batch, as the critic of a GAN does."""


@dataclass(frozen=True, eq=False)
class StepCall:
    """A call that steps an optimizer; with `elastic.init` the optimizer is the run."""

    call: ast.Call
    optimizer: ast.expr
    frame: CallFrame


@dataclass(frozen=True, eq=False)
class Training:
    """The training of a program.

    - `anchor`: its outermost loop; objects are prepared before it.
    - `epoch`: the loop over epochs, if there is one.
    - `batch`: the loop over a DataLoader. Else there is either `iteration`, a loop of steps with data of its own, or
      `cut`, a loop over batches that the script cuts from its data.
    - `around`: loops around the training, such as folds; `others`: further trainings in the program.
    """

    anchor: Loop
    epoch: Loop | None
    batch: Loop | None
    iteration: Loop | None
    cut: Loop | None
    around: tuple[Loop, ...]
    others: tuple[Loop, ...]
    reached: tuple[Reached, ...]
    frames: dict[ast.AST, CallFrame]
    steps: tuple[StepCall, ...]
    backwards: tuple[ast.Call, ...]


def is_backward(call: ast.Call) -> bool:
    """Return whether a call computes gradients."""
    return isinstance(call.func, ast.Attribute) and call.func.attr in ("backward", "manual_backward")


def stepped(program: Program, call: ast.Call) -> ast.expr | None:
    """Return the optimizer that a call steps, or the run of `elastic.init`; None if it steps none."""
    func = call.func
    if not isinstance(func, ast.Attribute) or func.attr != "step":
        return None
    kind = program.kind(func.value)
    if kind in (Kind.OPTIMIZER, Kind.RUN):
        return func.value
    return call.args[0] if kind is Kind.SCALER and call.args else None


def backward_calls(program: Program) -> list[ast.Call]:
    """Return all calls that compute gradients."""
    return [call for call in program.calls if is_backward(call)]


def step_calls(program: Program) -> dict[ast.Call, ast.expr]:
    """Return all calls that step an optimizer, each with its optimizer."""
    found = {call: stepped(program, call) for call in program.calls}
    return {call: optimizer for call, optimizer in found.items() if optimizer is not None}


def loader_of(program: Program, loop: Loop) -> ast.expr | None:
    """Return the DataLoader that a loop goes over, as the script names it."""
    if isinstance(loop, ast.While):
        return None
    node = loop.iter
    for _ in range(6):
        inner = _wrapped(node)
        if inner is None and isinstance(node, ast.Name):
            values = [binding.value for binding in program.local_bindings(program.scopes[node], node.id)]
            inner = next((found for found in map(_wrapped, values) if found is not None), None)
        if inner is None:
            break
        node = inner
    return node if program.kind(node) is Kind.LOADER or is_assumed(program, node) else None


def is_assumed(program: Program, node: ast.expr) -> bool:
    """Return whether an object is only assumed to be a DataLoader, by its name, because it comes from elsewhere."""
    if not re.search(r"train|iter|batch", dotted(node).rpartition(".")[2].lower()) or program.kind(node) is not None:
        return False
    origins = program.origins(node)
    names = [program.name(one.func) if isinstance(one, ast.Call) else "" for one in origins]
    return all(name and not name.startswith(("torch.", "numpy.", "np.")) for name in names) and not any(
        program.functions(one) for one in origins if isinstance(one, ast.Call)
    )


def _wrapped(node: ast.expr) -> ast.expr | None:
    """What `enumerate`, `tqdm` and the like go over."""
    if not isinstance(node, ast.Call) or not node.args:
        return None
    last = node.func.attr if isinstance(node.func, ast.Attribute) else dotted(node.func)
    if last == "zip":
        return next((one for one in node.args if kind_by_hint(dotted(one)) is Kind.LOADER), None)
    return node.args[0] if last in WRAPS else None


def range_of(loop: Loop) -> ast.Call | None:
    """Return the call of `range` or `trange` that a loop goes over."""
    node: ast.expr | None = None if isinstance(loop, ast.While) else loop.iter
    while node is not None:
        if isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] in ("range", "trange"):
            return node
        node = _wrapped(node)
    return None


def _is_counted(loop: Loop) -> bool:
    """Whether a loop counts: over `range`, or over the steps of an elastic training."""
    if isinstance(loop, ast.While) or range_of(loop) is not None:
        return True
    func = loop.iter.func if isinstance(loop.iter, ast.Call) else None
    return func is not None and dotted(func).rpartition(".")[2] in ("steps", "micro_steps", "count")


class _Reaches:
    """What each loop of a program reaches."""

    def __init__(self, program: Program) -> None:
        self._backwards = set(backward_calls(program))
        self.steps = step_calls(program)
        self.of: dict[Loop, tuple[Reached, ...]] = {}
        if self._backwards and self.steps:
            for loop in program.loops:
                reached = tuple(reach(program, loop.body))
                if self._trains(reached):
                    self.of[loop] = reached

    def _trains(self, reached: tuple[Reached, ...]) -> bool:
        calls = {one.node for one in reached if isinstance(one.node, ast.Call)}
        return bool(calls & self._backwards) and any(call in self.steps for call in calls)

    def inner(self, loop: Loop) -> list[Loop]:
        """The loops within a loop that compute gradients and step, too."""
        found = [one.node for one in self.of[loop] if is_loop(one.node)]
        return [one for one in found if one in self.of and one is not loop]

    def children(self, loop: Loop) -> list[Loop]:
        """The outermost of them."""
        inner = self.inner(loop)
        deeper = {one for other in inner for one in self.inner(other)}
        return [one for one in inner if one not in deeper] or inner[:1]


def find_training(program: Program) -> Training | None:
    """Find the training of a program; None if no loop computes gradients and steps."""
    reaches = _Reaches(program)
    if not reaches.of:
        return None
    within = {inner for loop in reaches.of for inner in reaches.inner(loop)}
    roots = [loop for loop in reaches.of if loop not in within] or [next(iter(reaches.of))]
    with_loader = [root for root in roots if any(_has_loader(program, one) for one in [root, *reaches.inner(root)])]
    root = (with_loader or roots)[0]
    others = tuple(loop for loop in roots if loop is not root)
    path = _path(program, reaches, root)
    return _classified(program, reaches, path, others)


def _has_loader(program: Program, loop: Loop) -> bool:
    return loader_of(program, loop) is not None


def _path(program: Program, reaches: _Reaches, root: Loop) -> list[Loop]:
    """The loops from the outermost to the innermost one that computes gradients and steps."""
    path = [root]
    while len(path) < 20:
        children = [one for one in reaches.children(path[-1]) if one not in path]
        if not children:
            break
        fitting = [one for one in children if any(_has_loader(program, x) for x in [one, *reaches.inner(one)])]
        path.append((fitting or children)[0])
    return path


def _classified(program: Program, reaches: _Reaches, path: list[Loop], others: tuple[Loop, ...]) -> Training:
    with_loader = [place for place, loop in enumerate(path) if _has_loader(program, loop)]
    epoch = batch = iteration = cut = None
    if with_loader:
        place = with_loader[-1]
        batch = path[place]
    else:
        place = next((at for at, loop in enumerate(path) if at and not _repeats(loop)), 0)
        if place:
            cut = path[place]
        elif _is_counted(path[0]):
            iteration = path[0]
        else:
            cut = path[0]
    outside = [at for at in range(place) if not _is_listed(path[at])]
    first = place
    if outside:
        first = outside[-1]
        epoch = path[first]
    anchor = path[first]
    reached = reaches.of[anchor]
    frames = {one.node: one.frame for one in reached}
    return Training(
        anchor,
        epoch,
        batch,
        iteration,
        cut,
        tuple(path[:first]),
        others,
        reached,
        frames,
        tuple(
            StepCall(one.node, reaches.steps[one.node], one.frame)
            for one in reached
            if isinstance(one.node, ast.Call) and one.node in reaches.steps
        ),
        tuple(one.node for one in reached if isinstance(one.node, ast.Call) and is_backward(one.node)),
    )


def _is_listed(loop: Loop) -> bool:
    """Whether a loop goes over a list in the source, such as `for phase in ["train", "val"]`."""
    return not isinstance(loop, ast.While) and isinstance(loop.iter, ast.List | ast.Tuple | ast.Set)


def _repeats(loop: Loop) -> bool:
    """Whether an inner loop only repeats steps on the same batch."""
    call = range_of(loop)
    if call is None or len(call.args) != 1 or isinstance(loop, ast.While):
        return False
    limit = call.args[0]
    if isinstance(limit, ast.Constant):
        return isinstance(limit.value, int) and limit.value <= MOST_REPEATS
    return re.search(r"critic|disc|inner|repeat", dotted(limit).lower()) is not None
