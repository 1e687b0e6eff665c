"""Arguments and results that hold tensors inside objects, such as a decoder's cache: taken apart into tensors, put together again.

What a call does to the objects that it is given, and the objects that it makes, is written down once and repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...guards.errors import MISS
from ...guards.finite_branches import Foretold
from ...guards.plain_values import ROUNDED, plain, plain_object

MOST = 4096  # objects of one call
ARGS, KWARGS = ("object", 0, None), ("object", 1, None)
# "tensor" or "object", its number; or "plain", the value, what equality does not tell of it
Ref = tuple[str, Any, Any]


class Opaque(ValueError):
    """What cannot be taken apart."""


@dataclass
class Content:
    """What one object holds. `names`: a dict's keys, an object's attributes; of other containers what pytrees know of them."""

    kind: type
    names: Any
    refs: tuple[Ref, ...]
    keys: tuple[type, ...] = ()  # of a dict: 0 is equal to False

    @property
    def made(self) -> bool:
        """Whether it can only be made of what it holds, not filled afterwards."""
        return self.kind not in (list, dict) and not plain_object(self.kind)


@dataclass
class After:
    """What a call leaves: every object that it was given or has made, its result, and how many tensors there are."""

    contents: list[Content]
    out: Ref
    tensors: int


class Objects:
    """How the arguments of calls like one example are taken apart, and what such a call does.

    Raises:
        Opaque: they hold something that is no tensor, number or text, and no container or object of such.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        seen = _Seen([], [args, dict(kwargs)])
        self.before, self.count = seen.opened(), len(seen.tensors)
        if any(type(t) is not Tensor for t in seen.tensors):
            raise Opaque("a tensor of a class of its own")
        known = {ARGS, KWARGS}
        self._steps = [_Step(content, self.before, known) for content in self.before]
        self._given = _Built(self.before, [], self.count)
        self.seen: list[After] = []  # by calls of `Flat`
        self.after: After | None = None  # a call of the model itself
        self.tensors: list[Tensor] = []  # that it was given and has made
        self._result: _Built | None = None
        # to whether numbers are finite; a graph gives one tensor more then, whether they hold
        self.answers: list[bool] = []

    def taken(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[list[Tensor], list[Any]] | None:
        """The tensors and the objects of a call; None where it is not like the example."""
        objects: list[Any] = [args, kwargs]
        tensors: list[Tensor] = []
        for i, step in enumerate(self._steps):
            if not step.take(objects[i], tensors, objects):
                return None
        changeable = [id(o) for o in objects if type(o) is not tuple]
        if len({*changeable}) < len(changeable) or len({*map(id, tensors)}) < len(tensors):
            return None  # two of the example's are one here
        return tensors, objects

    def around(self, tensors: Sequence[Tensor]) -> list[Any]:
        """New objects with these tensors in them: arguments, keyword arguments, and what lies in those."""
        return self._given.pool(tensors, [])[self.count :][: len(self.before)]

    def left(
        self, tensors: Sequence[Tensor], objects: Sequence[Any], out: Any
    ) -> tuple[After, list[Tensor]]:
        """What a call with these has left, and the tensors that it has made.

        Raises:
            Opaque: something of it cannot be taken apart.
        """
        seen = _Seen(tensors, objects)
        ref = seen.ref(out)
        contents = seen.opened()
        return After(contents, ref, len(seen.tensors)), seen.tensors[self.count :]

    def told(self, after: After, tensors: Sequence[Tensor]) -> None:
        """What a call of the model itself has left, and every tensor of it: from now on `put` leaves that, too.

        Raises:
            Opaque: a tensor of a class of its own, or a container that cannot be changed from outside.
        """
        if any(type(t) not in (Tensor, nn.Parameter) for t in tensors):
            raise Opaque("a tensor of a class of its own")
        self._result = _Built(after.contents, self.before, after.tensors)
        self.after, self.tensors = after, [*tensors]

    def served(
        self, program: Callable[..., Any], tensors: Sequence[Tensor], objects: Sequence[Any]
    ) -> Any:
        """The result of a call by what gives the tensors that it makes, or `MISS`."""
        made = program(tensors, {})
        if made is not MISS and self.answers:
            *made, held = made
            made = made if held else MISS
        return MISS if made is MISS else self.put(tensors, objects, made)

    def put(self, tensors: Sequence[Tensor], objects: Sequence[Any], made: Sequence[Tensor]) -> Any:
        """Do to the objects of a call what the example's did to its own; the result."""
        assert self._result is not None and self.after is not None
        kind, at, _ = self.after.out
        pool = self._result.pool([*tensors, *made], objects)
        return at if kind == "plain" else pool[at + self.after.tensors * (kind == "object")]

    def __deepcopy__(self, memo: dict[int, Any]) -> Objects:
        return self

    @property
    def kinds(self) -> list[type]:
        """The classes of the objects, of those that a call makes, too, and those that they hold."""
        contents = [*self.before, *(self.after.contents if self.after is not None else ())]
        held = [v for c in contents for k, v, _ in c.refs if k == "plain" and isinstance(v, type)]
        return [*dict.fromkeys([*(c.kind for c in contents if plain_object(c.kind)), *held])]


class Flat(nn.Module):
    """A model as a function of the tensors in its arguments, giving those that it makes. Its hooks run around what serves it."""

    def __init__(self, model: nn.Module, objects: Objects) -> None:
        super().__init__()
        self.model, self.objects = model, objects

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        """The tensors that a call makes."""
        objects = self.objects.around(tensors)
        if not self.objects.answers:
            out, verdict = self.model.forward(*objects[0], **objects[1]), []
        else:
            with Foretold(self.objects.answers) as told:
                out = self.model.forward(*objects[0], **objects[1])
            verdict = told.verdict()
        after, made = self.objects.left(tensors, objects, out)
        self.objects.seen.append(after)
        return [*made, *verdict]


class _Seen:
    """Every tensor and every object of some values, each once, in the order of their meeting."""

    def __init__(self, tensors: Sequence[Tensor], objects: Sequence[Any]) -> None:
        self.tensors, self.objects = [*tensors], [*objects]
        self._tensors = {id(t): i for i, t in enumerate(tensors)}
        self._objects = {id(o): i for i, o in enumerate(objects)}

    def opened(self) -> list[Content]:
        """What each object holds, those that are met meanwhile included."""
        contents: list[Content] = []
        while len(contents) < len(self.objects):
            if len(self.objects) > MOST:
                raise Opaque(f"more than {MOST} objects")
            each = self.objects[len(contents)]
            names, values = _opened(each)
            if isinstance(names, pytree.TreeSpec) and not _remakes(each, names, values):
                raise Opaque(f"a {type(each).__qualname__}, which holds more than pytrees know of")
            keys = tuple(map(type, names)) if type(each) is dict else ()
            contents.append(Content(type(each), names, tuple(map(self.ref, values)), keys))
        return contents

    def ref(self, value: Any) -> Ref:
        """What stands for a value."""
        if isinstance(value, Tensor):
            return "tensor", _number(value, self.tensors, self._tensors), None
        kind = type(value)
        if plain(kind):
            return "plain", value, repr(value) if kind in ROUNDED else kind
        return "object", _number(value, self.objects, self._objects), None


def _number(value: Any, known: list[Any], numbers: dict[int, int]) -> int:
    found = numbers.get(id(value))
    if found is None:
        found = numbers[id(value)] = len(known)
        known.append(value)
    return found


def _opened(value: Any) -> tuple[Any, Sequence[Any]]:
    """The names in an object and what they stand for."""
    kind = type(value)
    if kind is tuple or kind is list:
        return None, value
    if kind is dict and all(map(plain, map(type, value))):
        return [*value], [*value.values()]
    if plain_object(kind):
        return [*vars(value)], [*vars(value).values()]
    children, spec = pytree.tree_flatten(value, is_leaf=lambda v: v is not value)
    if spec.is_leaf():
        raise Opaque(f"a {kind.__qualname__}")
    return spec, children


def _remakes(value: Any, spec: pytree.TreeSpec, children: Sequence[Any]) -> bool:
    """Whether what pytrees make of the parts of an object is one like it, with the same parts."""
    twin = pytree.tree_unflatten(children, spec)
    if type(twin) is not type(value) or [*_attributes(twin)] != [*_attributes(value)]:
        return False
    again, parts = _opened(twin)
    return again == spec and all(a is b for a, b in zip(parts, children, strict=True))


def _attributes(value: Any) -> Iterable[str]:
    return vars(value) if hasattr(value, "__dict__") else ()


class _Step:
    """Takes one object of a call apart if it looks as the example's did. `known`: what the objects before it hold, too."""

    def __init__(self, content: Content, contents: Sequence[Content], known: set[Ref]) -> None:
        self.kind, self.names = content.kind, content.names
        self.plain_object = plain_object(self.kind)
        self.keys = [*map(type, self.names)] if self.kind is dict else []
        self.types: list[type] = []
        self.met: list[tuple[int, bool, int]] = []  # place of what is known, if a tensor, number
        new: dict[str, list[int]] = {"tensor": [], "object": [], "plain": []}
        for i, ref in enumerate(content.refs):
            kind, value, _ = ref
            found = contents[value].kind if kind == "object" else Tensor
            self.types.append(type(value) if kind == "plain" else found)
            if kind != "plain" and ref in known:
                self.met.append((i, kind == "tensor", value))
            else:
                new[kind].append(i)
                known |= {ref} if kind != "plain" else set()
        self.tensors, self.objects, self.plain = (picking(new[k]) for k in new)
        self.values = self.plain([r[1] for r in content.refs])
        self.rounded = any(type(v) in ROUNDED for v in self.values)

    def take(self, value: Any, tensors: list[Tensor], objects: list[Any]) -> bool:
        """Append what it holds; False where it is another."""
        kind, held = self.kind, value
        if kind is dict:
            if [*map(type, value)] != self.keys or [*value] != self.names:
                return False
            held = [*value.values()]
        elif self.plain_object:
            known = vars(value)
            if [*known] != self.names:
                return False
            held = [*known.values()]
        elif kind is not tuple and kind is not list:
            names, held = _opened(value)
            if names != self.names:
                return False
        if [*map(type, held)] != self.types:
            return False
        plain = self.plain(held)
        if plain != self.values or (self.rounded and repr(plain) != repr(self.values)):
            return False
        tensors += self.tensors(held)
        objects += self.objects(held)
        return all(held[i] is (tensors if t else objects)[n] for i, t, n in self.met)


class _Built:
    """Puts objects together out of tensors: the first ones, of which `known` says what they hold, are changed, others are made."""

    def __init__(self, contents: Sequence[Content], known: Sequence[Content], tensors: int) -> None:
        self.constants: list[Any] = []
        self.made: list[tuple[int, Callable[[Any], Any], Any]] = []
        self.filled: list[tuple[int, Callable[[Any, Any], None], Any]] = []

        def places(refs: Sequence[Ref]) -> list[int]:
            found = []
            for kind, value, _ in refs:
                if kind == "plain":
                    self.constants.append(value)
                    value = tensors + len(contents) + len(self.constants) - 1
                found.append(value + tensors * (kind == "object"))
            return found

        for i, (before, content) in enumerate(zip(known, contents, strict=False)):
            if content != before:
                fill, refs = _changing(before, content)
                self.filled.append((tensors + i, fill, picking(places(refs))))
        self.shells = [_shell(c) for c in contents[len(known) :]]
        for i in _ordered(contents, len(known)):
            content = contents[i]
            get = picking(places(content.refs))
            if content.made:
                self.made.append((tensors + i, _maker(content), get))
            elif content.refs:
                self.filled.append((tensors + i, _filling(content.kind, content.names), get))

    def pool(self, tensors: Sequence[Tensor], objects: Sequence[Any]) -> list[Any]:
        """The tensors, all objects after them."""
        pool = [*tensors, *objects, *(shell() for shell in self.shells), *self.constants]
        for at, make, get in self.made:
            pool[at] = make(get(pool))
        for at, fill, get in self.filled:
            fill(pool[at], get(pool))
        return pool


def _ordered(contents: Sequence[Content], first: int) -> list[int]:
    """The objects from `first` on, those that another is made of before it."""
    found: dict[int, None] = {}

    def visit(i: int) -> None:
        if i >= first and i not in found:
            for kind, value, _ in contents[i].refs if contents[i].made else ():
                if kind == "object":
                    visit(value)
            found[i] = None

    for i in range(first, len(contents)):
        visit(i)
    return [*found]


def _shell(content: Content) -> Callable[[], Any]:
    """What makes an empty one; nothing yet of those that are made of what they hold."""
    if content.made:
        return lambda: None
    kind = content.kind
    return kind if kind in (list, dict) else lambda: object.__new__(kind)


def _maker(content: Content) -> Callable[[Any], Any]:
    if content.kind is tuple:
        return tuple
    return lambda values: pytree.tree_unflatten(values, content.names)


def _filling(kind: type, names: Any) -> Callable[[Any, Any], None]:
    if kind is list:
        return lambda value, held: value.__setitem__(slice(None), held)
    if kind is dict:
        return lambda value, held: value.update(zip(names, held, strict=True))
    return lambda value, held: vars(value).update(zip(names, held, strict=True))


def _changing(before: Content, after: Content) -> tuple[Callable[[Any, Any], None], Sequence[Ref]]:
    """What gives an object its new content, and which of that it takes."""
    kind, names, refs = after.kind, after.names, after.refs
    if after.made or kind is not before.kind:
        raise Opaque(f"a {kind.__qualname__} that a call changes")
    fill = _filling(kind, names)
    if kind is list:
        return fill, refs
    if names == before.names and after.keys == before.keys:
        new = [i for i, (a, b) in enumerate(zip(refs, before.refs, strict=True)) if a != b]
        return _filling(kind, [names[i] for i in new]), [refs[i] for i in new]

    def anew(value: Any, held: Any) -> None:
        (value if kind is dict else vars(value)).clear()
        fill(value, held)

    return anew, refs


def picking(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What takes the elements at these places, in C where there are several."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: tuple(values[i] for i in places)
