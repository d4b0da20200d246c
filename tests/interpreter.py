"""Triton's interpreter without the work that it repeats for each launch and each operation.

It computes the same: only look-ups whose results cannot change are kept. Applies to the layout of
the interpreter that `quicken` knows; another version runs as it is.
"""

from __future__ import annotations

import math
import types
from typing import Any


def quicken() -> None:
    """Patch the interpreter of this process; repeated calls change nothing."""
    try:
        from triton.language import core
        from triton.runtime import interpreter
    except ImportError:
        return
    names = ("_LangPatchScope", "_patch_lang", "_patch_attr", "_get_np_dtype", "ScanOps")
    if not all(hasattr(interpreter, name) for name in names) or hasattr(interpreter, "quickened"):
        return
    interpreter.quickened = True
    _patch_the_language_once(interpreter, core)
    _keep_numpy_types(interpreter)
    _type_tuples_when_asked(core)
    _keep_shapes(core)
    _scan_by_slices(interpreter)


def _patch_the_language_once(interpreter: Any, core: Any) -> None:
    """Triton replaces the builtins of its language for each launch, and again for each call of one
    jitted function by another, listing their modules each time."""
    patch, done = interpreter._patch_lang, []

    def patch_attribute(place: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        # The decorator `builtin` only checks that `_semantic` is given.
        function = getattr(member, "__wrapped__", member)

        def replaced(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **kwargs)

        scope.set_attr(place, name, replaced)

    def patch_once(function: Any) -> Any:
        if not done:
            modules = {"tl": interpreter.tl, "core": core}
            done.append(patch(types.FunctionType((lambda: None).__code__, modules)))
        return interpreter._LangPatchScope()

    interpreter._patch_attr = patch_attribute
    interpreter._patch_lang = patch_once


def _keep_numpy_types(interpreter: Any) -> None:
    find, found = interpreter._get_np_dtype, {}

    def numpy_type(kind: Any) -> Any:
        if kind.name not in found:
            found[kind.name] = find(kind)
        return found[kind.name]

    interpreter._get_np_dtype = numpy_type


def _type_tuples_when_asked(core: Any) -> None:
    """The shape of each tensor is a tuple, whose type only the compiler asks for."""
    kind = core.tuple
    initialize = kind.__init__

    def init(self: Any, args: Any, type: Any = None) -> None:
        if type is None:
            self.values = list(args)
        else:
            initialize(self, args, type)

    def read(self: Any) -> Any:
        if "_type" not in self.__dict__:
            self._type = core._type_for_tuple_values(self.values)
        return self._type

    def write(self: Any, value: Any) -> None:
        self._type = value

    kind.__init__, kind.type = init, property(read, write)


def _keep_shapes(core: Any) -> None:
    """Each operation makes the types of its blocks, and their shapes, anew."""
    check, unwrap = core.block_type.__init__, core._unwrap_if_constexpr
    kept: dict[Any, dict[str, Any]] = {}
    constants: dict[int, tuple[Any, Any, Any]] = {}
    single = core.tuple([]), core.constexpr(1)
    wrappers = (list, tuple, core.tuple, core.constexpr)

    def unwrapped(value: Any) -> Any:
        return unwrap(value) if isinstance(value, wrappers) else value

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple(map(unwrapped, shape))
        if key not in kept:
            check(self, element_ty, shape)
            kept[key] = dict(vars(self))
        vars(self).update(kept[key], element_ty=element_ty)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        if not type.is_block():
            self.shape, self.numel = single
            return
        shape = type.shape
        if id(shape) not in constants:
            sizes = core.tuple([core.constexpr(size) for size in shape])
            constants[id(shape)] = shape, sizes, core.constexpr(math.prod(shape))
        _, self.shape, self.numel = constants[id(shape)]

    core._unwrap_if_constexpr = unwrapped
    core.block_type.__init__ = init_block
    core.tensor.__init__ = init_tensor


def _scan_by_slices(interpreter: Any) -> None:
    """A scan combines numbers one by one; slices across its axis give the same numbers."""
    np = interpreter.np

    def scan(self: Any, inputs: Any) -> list[Any]:
        whole = [np.moveaxis(part.handle.data, self.axis, 0) for part in inputs]
        combined = [tuple(part[0] for part in whole)]
        for at in range(1, len(whole[0])):
            sides = (combined[-1], tuple(part[at] for part in whole))
            tensors = [
                self.to_tensor(data, part.dtype)
                for side in sides
                for data, part in zip(side, inputs, strict=True)
            ]
            found = self.combine_fn.fn(*tensors)
            found = found if isinstance(found, tuple) else (found,)
            combined.append(tuple(part.handle.data for part in found))
        return [
            self.to_tensor(np.moveaxis(np.stack(parts), 0, self.axis), part.dtype)
            for parts, part in zip(zip(*combined, strict=True), inputs, strict=True)
        ]

    interpreter.ScanOps.generic_scan = scan
