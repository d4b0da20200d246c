"""Triton's interpreter without the work that it repeats for each launch and each operation.

It computes the same: only look-ups whose results cannot change are kept. Applies to Triton 3.7,
whose interpreter `quicken` knows; another version runs as it is.
"""

from __future__ import annotations

import dataclasses
import math
import types
from typing import Any


def quicken() -> None:
    """Patch the interpreter of this process; repeated calls change nothing."""
    try:
        import triton
        from triton.language import core
        from triton.runtime import interpreter
    except ImportError:
        return
    if triton.__version__.split(".")[:2] != ["3", "7"] or hasattr(interpreter, "quickened"):
        return
    interpreter.quickened = True
    _patch_the_language_once(interpreter, core)
    _keep_numpy_types(interpreter)
    _type_tuples_when_asked(core)
    _keep_types(core)
    _compare_types_by_name(core)
    _check_no_overflow_in_vain(interpreter)
    _plan_operands(interpreter, core)
    _add_axes_at_once(interpreter, core)
    _check_sizes_by_name(interpreter)
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


def _keep_types(core: Any) -> None:
    """Each operation makes the types of its blocks, and their shapes, anew: one object stands for
    each type of block here, with what tensors of that type have in common."""
    check, unwrap = core.block_type.__init__, core._unwrap_if_constexpr
    wrappers = (list, tuple, core.tuple, core.constexpr)
    kept: dict[Any, Any] = {}
    sizes: dict[int, tuple[Any, Any, Any]] = {}
    single = core.tuple([]), core.constexpr(1)

    def unwrapped(value: Any) -> Any:
        return unwrap(value) if isinstance(value, wrappers) else value

    def new_block(cls: Any, element_ty: Any, shape: Any) -> Any:
        found = kept.get((element_ty.name, tuple(map(unwrapped, shape))))
        return object.__new__(cls) if found is None else found

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        if not vars(self):
            check(self, element_ty, shape)
            self.sizes = tuple(self.shape.values)
            kept[element_ty.name, self.sizes] = self

    def with_element(self: Any, scalar_ty: Any) -> Any:
        return kept.get((scalar_ty.name, self.sizes)) or core.block_type(scalar_ty, self.shape)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        if not type.is_block():
            self.shape, self.numel = single
            return
        if id(type) not in sizes:
            shape = core.tuple([core.constexpr(size) for size in type.shape])
            sizes[id(type)] = type, shape, core.constexpr(math.prod(type.shape))
        _, self.shape, self.numel = sizes[id(type)]

    core._unwrap_if_constexpr = unwrapped
    core.block_type.__new__, core.block_type.__init__ = new_block, init_block
    core.block_type.with_element_ty = with_element
    core.block_type.to_ir = lambda self, builder: self
    core.tensor.__init__ = init_tensor


def _compare_types_by_name(core: Any) -> None:
    """A type asks lists of names, joined for each question, what it is."""
    kind = core.dtype
    signed, unsigned = frozenset(kind.SINT_TYPES), frozenset(kind.UINT_TYPES)
    floats, integers = frozenset(kind.FP_TYPES), signed | unsigned
    compare = kind.__eq__

    kind.is_int = lambda self: self.name in integers
    kind.is_int_signed = lambda self: self.name in signed
    kind.is_int_unsigned = lambda self: self.name in unsigned
    kind.is_floating = lambda self: self.name in floats
    kind.__eq__ = lambda self, other: self is other or compare(self, other)


def _check_no_overflow_in_vain(interpreter: Any) -> None:
    """Sums and products of integers are made again in 64 bits, for an assertion that only a
    debugged kernel makes."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _plan_operands(interpreter: Any, core: Any) -> None:
    """What types two operands get is found out once for each pair of types.

    An operand of fewer elements bears the type of the result here, but its data stay as few: numpy
    broadcasts as it computes, and the operands go nowhere else.
    """
    semantic = type(interpreter.interpreter_semantic)
    check, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    tensor, numbers = core.tensor, (int, float, bool)
    np, handle = interpreter.np, interpreter.TensorHandle
    plans: dict[Any, tuple[Any, Any]] = {}
    shared: dict[Any, tuple[Any, Any]] = {}

    def fitted(self: Any, operand: Any, type: Any) -> Any:
        if operand.type is type:
            return operand
        if operand.dtype is not type.scalar:
            operand = self.cast(operand, type.scalar)
        return operand if operand.type is type else tensor(operand.handle, type)

    def operands(self: Any, lhs: Any, rhs: Any, *flags: bool) -> Any:
        if type(lhs) is not tensor or type(rhs) not in (tensor, *numbers):
            return check(self, lhs, rhs, *flags)
        number = type(rhs) is not tensor
        other = self.to_tensor_type(rhs) if number else rhs.type
        key = lhs.type.name, other.name, number, flags
        if key not in plans:
            found = check(self, lhs, rhs, *flags)
            plans[key] = found[0].type, found[1].type
            return found
        left, right = plans[key]
        if number:
            kind = right.scalar
            if kind.is_int() and not kind.get_int_min_value() <= rhs <= kind.get_int_max_value():
                return check(self, lhs, rhs, *flags)
            rhs = self.scalar_constant(rhs, kind)
        return fitted(self, lhs, left), fitted(self, rhs, right)

    def filled(operand: Any, type: Any) -> Any:
        if operand.type is type:
            return operand
        data = np.empty(type.sizes, operand.handle.data.dtype)
        data[...] = operand.handle.data
        return tensor(handle(data, operand.dtype), type)

    def broadcast_by_plan(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type is rhs.type:
            return lhs, rhs
        key = lhs.type.name, rhs.type.name
        if key not in shared:
            found = broadcast(self, lhs, rhs)
            shared[key] = found[0].type, found[1].type
            return found
        left, right = shared[key]
        if not left.is_block():
            return lhs, rhs
        return filled(lhs, left), filled(rhs, right)

    semantic.binary_op_type_checking_impl = operands
    semantic.broadcast_impl_value = broadcast_by_plan


def _add_axes_at_once(interpreter: Any, core: Any) -> None:
    """`x[:, None]` looks at each of its parts several times."""
    tensor, handle, block = core.tensor, interpreter.TensorHandle, core.block_type
    get, semantic = tensor.__getitem__, interpreter.interpreter_semantic
    whole = slice(None)

    def item(self: Any, slices: Any) -> Any:
        kind = self.type
        if (
            type(slices) is not tuple
            or not kind.is_block()
            or any(part is not None and part != whole for part in slices)
            or len(slices) - slices.count(None) != len(kind.sizes)
        ):
            return get(self, slices, _semantic=semantic)
        sizes = iter(kind.sizes)
        shape = core.tuple([1 if part is None else next(sizes) for part in slices])
        return tensor(handle(self.handle.data[slices], self.dtype), block(self.dtype, shape))

    tensor.__getitem__ = item


def _check_sizes_by_name(interpreter: Any) -> None:
    """Each result is checked against the size of its type, twice."""
    handle, builder = interpreter.TensorHandle, interpreter.InterpreterBuilder
    numpy_type = interpreter._get_np_dtype
    sizes: dict[str, float] = {}

    def size_of(kind: Any) -> float:
        """Bytes of an element at most."""
        if kind.name not in sizes:
            sizes[kind.name] = math.inf if kind.is_ptr() else max(1, kind.primitive_bitwidth // 8)
        return sizes[kind.name]

    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if data.itemsize > size_of(dtype):
            self.__post_init__()

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        output, kind = op(lhs.data, rhs.data), lhs.dtype.scalar
        if output.itemsize > size_of(kind):
            output = output.astype(numpy_type(kind))
        return handle(output, kind)

    handle.__init__, builder.binary_op = init, binary_op


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
            # Slices of one dimension are single numbers, which come back as arrays of one.
            combined.append(tuple(part.handle.data.reshape(whole[0].shape[1:]) for part in found))
        return [
            self.to_tensor(np.moveaxis(np.stack(parts), 0, self.axis), part.dtype)
            for parts, part in zip(zip(*combined, strict=True), inputs, strict=True)
        ]

    interpreter.ScanOps.generic_scan = scan
