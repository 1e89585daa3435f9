"""Objects of a training: its modules, optimizers, loader, schedulers and scaler, as the script names them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from bftrainer.explain.reading.kinds import Kind
from bftrainer.explain.reading.program import Program, is_function, parameters
from bftrainer.explain.reading.reach import CallFrame, outer_expression
from bftrainer.explain.reading.source import dotted
from bftrainer.explain.training.loops import Training, loader_of

ORDER = (Kind.MODEL, Kind.OPTIMIZER, Kind.LOADER, Kind.SCHEDULER, Kind.SCALER, Kind.AVERAGE)
_METHODS = {
    Kind.SCHEDULER: ("step",),
    Kind.SCALER: ("scale", "step", "update", "unscale_"),
    Kind.AVERAGE: ("update_parameters", "update", "step"),
}


@dataclass(frozen=True, eq=False)
class TrainedObject:
    """An object of the training. `text` names it where the training's outermost loop is; empty if nothing does."""

    kind: Kind
    text: str
    seen: ast.expr
    """Where the training uses it."""
    expression: ast.expr | None = None
    """The expression of `text`."""


@dataclass
class TrainedObjects:
    """All objects of a training, each once."""

    found: list[TrainedObject] = field(default_factory=list)

    def add(self, one: TrainedObject) -> None:
        """Add an object, unless it is known."""
        if not any(known.kind == one.kind and known.text == one.text for known in self.found):
            self.found.append(one)

    def of(self, kind: Kind) -> list[TrainedObject]:
        """Return the objects of a kind."""
        return [one for one in self.found if one.kind == kind]

    @property
    def named(self) -> list[TrainedObject]:
        """The objects that can be given to `prepare`, in the order of its documentation."""
        return [one for kind in ORDER for one in self.of(kind) if one.text]

    @property
    def unnamed(self) -> list[TrainedObject]:
        """The objects that have no name where they would be prepared."""
        return [one for one in self.found if not one.text]


def find_objects(program: Program, training: Training) -> TrainedObjects:
    """Find the objects of a training."""
    finder = _Finder(program, training)
    objects = TrainedObjects()
    for step in training.steps:
        for one in finder.optimizers(step.optimizer, step.frame):
            objects.add(one)
    for one in finder.models(objects.of(Kind.OPTIMIZER)):
        objects.add(one)
    if training.batch is not None:
        objects.add(finder.loader(training.batch))
    for kind, methods in _METHODS.items():
        for one in finder.called_on(kind, methods):
            objects.add(one)
    return objects


class _Finder:
    def __init__(self, program: Program, training: Training) -> None:
        self._program = program
        self._training = training
        self._scope = program.scopes[training.anchor]

    def optimizers(self, node: ast.expr, frame: CallFrame) -> Iterator[TrainedObject]:
        """The optimizer of a step, or all of them if a loop goes over a list of optimizers."""
        container = self._container(node)
        if container is None:
            yield self._object(Kind.OPTIMIZER, node, frame)
        for element in container or ():
            yield self._object(Kind.OPTIMIZER, element, frame)

    def _container(self, node: ast.expr) -> list[ast.expr] | None:
        """The items of the list that a loop variable comes from."""
        bindings = [one for one in self._program.bindings(node) if one.element]
        if not bindings:
            return None
        lists = [bindings[0].value]
        if not isinstance(lists[0], ast.List | ast.Tuple):
            lists = [one.value for one in self._program.bindings(lists[0])]
        items = [item for one in lists if isinstance(one, ast.List | ast.Tuple) for item in one.elts]
        return items if items and all(dotted(item) for item in items) else None

    def models(self, optimizers: Iterable[TrainedObject]) -> list[TrainedObject]:
        """The modules that optimizers train; else those that the training calls."""
        program = self._program
        values = [binding.value for one in optimizers for binding in program.bindings(one.expression or one.seen)]
        trained = [module for value in values for module in modules_in(program, value)]
        models = [self._object(Kind.MODEL, module, CallFrame()) for module in trained]
        if trained and all(program.scopes[one] is self._scope for one in trained) and all(one.text for one in models):
            return models
        called = [one for one in self._called_models() if one.text]
        made = {origin for module in trained for origin in program.origins(module)}
        same = [one for one in called if made & set(program.origins(one.seen))]
        return same or called or models

    def _called_models(self) -> list[TrainedObject]:
        found = []
        for one in self._training.reached:
            if isinstance(one.node, ast.Call) and isinstance(one.node.func, ast.Name | ast.Attribute):
                func = one.node.func
                if self._makes_module(func):
                    found.append(self._object(Kind.MODEL, func, one.frame))
        return found

    def _makes_module(self, func: ast.Name | ast.Attribute) -> bool:
        origins = self._program.origins(func)
        if any(self._program.kind_of_origin(origin) is Kind.MODEL for origin in origins):
            return True
        return not origins and dotted(func).rpartition(".")[2] in ("model", "net", "network", "module")

    def loader(self, batch: ast.AST) -> TrainedObject:
        """The DataLoader of the loop over batches."""
        assert isinstance(batch, ast.For | ast.AsyncFor)
        node = loader_of(self._program, batch)
        assert node is not None
        return self._object(Kind.LOADER, node, self._training.frames.get(batch, CallFrame()))

    def called_on(self, kind: Kind, methods: tuple[str, ...]) -> Iterator[TrainedObject]:
        """The objects of a kind whose methods the training calls."""
        for one in self._training.reached:
            func = one.node.func if isinstance(one.node, ast.Call) else None
            if isinstance(func, ast.Attribute) and func.attr in methods and self._program.kind(func.value) is kind:
                yield self._object(kind, func.value, one.frame)

    def _object(self, kind: Kind, node: ast.expr, frame: CallFrame) -> TrainedObject:
        outer = outer_expression(self._program, node, frame)
        outer = None if outer is None else self._with_constant_index(outer)
        if outer is None or not self._is_nameable(outer):
            return TrainedObject(kind, "", node)
        text = ast.unparse(outer)
        return TrainedObject(kind, text if '"' in text else text.replace("'", '"'), node, outer)

    def _with_constant_index(self, node: ast.expr) -> ast.expr:
        """`loaders[phase]` in a loop over a list of phases is the one whose name has "train" in it."""
        if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Name):
            return node
        for binding in self._program.bindings(node.slice):
            if binding.element and isinstance(binding.value, ast.List | ast.Tuple):
                texts = [
                    one for one in binding.value.elts if isinstance(one, ast.Constant) and "train" in str(one.value)
                ]
                if texts:
                    made = ast.Subscript(node.value, texts[0], ast.Load())
                    self._program.scopes[made] = self._program.scopes[node]
                    return made
        return node

    def _is_nameable(self, node: ast.expr) -> bool:
        """Whether an expression can be written, and assigned to, where the outermost loop is."""
        if isinstance(node, ast.Attribute):
            return self._root_is_visible(node)
        if isinstance(node, ast.Subscript):
            return isinstance(node.slice, ast.Constant) and self._root_is_visible(node)
        return isinstance(node, ast.Name) and node.id != "self" and self._root_is_visible(node)

    def _root_is_visible(self, node: ast.expr) -> bool:
        root: ast.expr = node
        while isinstance(root, ast.Attribute | ast.Subscript):
            root = root.value
        if not isinstance(root, ast.Name):
            return False
        if root.id == "self":
            return self._program.owner(node) is self._program.owner(self._training.anchor)
        scope = self._scope
        while True:
            if self._program.local_bindings(scope, root.id):
                return True
            if not is_function(scope):
                return False
            if root.id in parameters(scope):
                return True
            scope = self._program.scopes[scope]


def modules_in(program: Program, value: ast.expr, depth: int = 0) -> list[ast.expr]:
    """Return the modules that an expression uses, such as `net` in `SGD(net.parameters(), lr=0.1)`."""
    found: list[ast.expr] = []
    for node in ast.walk(value):
        if isinstance(node, ast.Attribute) and node.attr in ("parameters", "named_parameters") and dotted(node.value):
            found.append(_shortest(program, node.value))
        elif dotted(node) and isinstance(node, ast.Name | ast.Attribute) and program.kind(node) is Kind.MODEL:
            found.append(_shortest(program, node))
        elif isinstance(node, ast.Name) and depth < 2 and isinstance(node.ctx, ast.Load):
            for binding in program.local_bindings(program.scopes[node], node.id):
                if isinstance(binding.statement, ast.Assign | ast.AnnAssign) and binding.value is not value:
                    found += modules_in(program, binding.value, depth + 1) if _has_parameters(binding.value) else []
    unique: dict[str, ast.expr] = {}
    for one in found:
        unique.setdefault(ast.unparse(one), one)
    return list(unique.values())


def _has_parameters(value: ast.expr) -> bool:
    names = [node.attr for node in ast.walk(value) if isinstance(node, ast.Attribute)]
    return "parameters" in names or "named_parameters" in names


def _shortest(program: Program, node: ast.expr) -> ast.expr:
    """The module itself, where an expression names a part of it."""
    parts = [node]
    while isinstance(parts[-1], ast.Attribute):
        parts.append(parts[-1].value)
    return next((part for part in reversed(parts) if program.kind(part) is Kind.MODEL), node)
