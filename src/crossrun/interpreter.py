"""Repairs of Triton's CPU interpreter, so that kernels compute the same there as on a GPU.

The interpreter of Triton 3.6 to 3.9 stores bfloat16 and 8-bit floats as integer codes and is
silently wrong with them: bfloat16 arithmetic works on the codes (triton-lang/triton#11584), casts
to bfloat16 truncate, casts to 8-bit floats round ties away from zero and lose the mantissa's carry.
After ``install()``, arithmetic on these types is float32 arithmetic, and every cast rounds to
nearest even, saturating for 8-bit floats, as GPU instructions do.
``tests/crossrun/test_interpreter.py`` proves it; look there first if a new Triton release breaks.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_FLOAT8 = {
    tl.float8e4nv: (torch.float8_e4m3fn, 448.0),
    tl.float8e5: (torch.float8_e5m2, 57344.0),
    tl.float8e4b8: (torch.float8_e4m3fnuz, 240.0),
    tl.float8e5b16: (torch.float8_e5m2fnuz, 57344.0),
}


@functools.cache
def install() -> None:
    """Patch the interpreter of this process; repeated calls do nothing."""
    builder = interpreter.InterpreterBuilder
    builder.cast_impl = _cast(builder.cast_impl)
    builder.create_fp_to_fp = _float_cast(builder.create_fp_to_fp)
    builder.create_dot = _dot
    for name, operands in (("unary_op", 1), ("binary_op", 2), ("ternary_op", 3)):
        setattr(builder, name, _in_float32(getattr(builder, name), operands))
    interpreter._patch_lang_tensor = _with_scalar_index(interpreter._patch_lang_tensor)
    reduction = interpreter.ReduceOps
    reduction.apply_impl = _with_fast_xor(reduction.apply_impl)
    executor = interpreter.GridExecutor
    executor.__call__ = _without_warnings(executor.__call__)
    _patch_once()
    _spare_types()


def _is_coded(dtype: Any) -> bool:
    """Return True if the interpreter stores values of this type as integer codes."""
    return dtype == tl.bfloat16 or dtype in _FLOAT8


def to_float32(handle: Any) -> Any:
    """Decode a floating-point handle's values to a float32 array (float64 stays float64)."""
    dtype = handle.dtype.scalar
    codes = np.ascontiguousarray(handle.data)
    if dtype == tl.bfloat16:
        return (codes.astype(np.uint32) << 16).view(np.float32).reshape(handle.data.shape)
    if dtype in _FLOAT8:
        native, _ = _FLOAT8[dtype]
        values = torch.from_numpy(codes.astype(np.uint8, copy=True)).view(native)
        return values.float().numpy().reshape(handle.data.shape)
    return codes if codes.dtype == np.float64 else codes.astype(np.float32)


def from_float32(values: Any, dtype: Any) -> Any:
    """Encode ``values`` in ``dtype``: round to nearest even, saturate for 8-bit floats."""
    if dtype == tl.bfloat16:
        rounded = torch.from_numpy(np.array(values, np.float32)).bfloat16()
        return rounded.view(torch.int16).numpy().view(np.uint16).reshape(np.shape(values))
    if dtype in _FLOAT8:
        native, top = _FLOAT8[dtype]
        clamped = torch.from_numpy(np.array(values, np.float32)).clamp(-top, top)
        return clamped.to(native).view(torch.uint8).numpy().reshape(np.shape(values))
    return np.asarray(values).astype(interpreter._get_np_dtype(dtype))


def _cast(original: Callable[..., Any]) -> Callable[..., Any]:
    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        have, want = source.dtype.scalar, target.scalar
        if have == want or not (_is_coded(have) or _is_coded(want)):
            return original(self, source, target)
        values = to_float32(source) if have.is_floating() else source.data.astype(np.float32)
        return interpreter.TensorHandle(from_float32(values, want), want)

    return cast_impl


def _float_cast(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        want = target.scalar
        if not (_is_coded(source.dtype.scalar) or _is_coded(want)):
            return original(self, source, target, rounding)
        return interpreter.TensorHandle(from_float32(to_float32(source), want), want)

    return create_fp_to_fp


def _dot(self: Any, a: Any, b: Any, accumulator: Any, *_: Any) -> Any:
    """Multiply matrices with float32 accumulation, or int32 for integers."""
    kept = accumulator.data.dtype
    if a.dtype.scalar.is_floating():
        product = np.matmul(to_float32(a), to_float32(b)) + accumulator.data
    else:
        product = np.matmul(a.data, b.data, dtype=kept) + accumulator.data
    return interpreter.TensorHandle(product.astype(kept), accumulator.dtype.scalar)


def _in_float32(original: Callable[..., Any], operands: int) -> Callable[..., Any]:
    def operate(self: Any, *args: Any) -> Any:
        handles, rest = args[:operands], args[operands:]
        coded = [handle.dtype.scalar.is_bf16() for handle in handles]
        # ``select`` copies codes, which needs no decoding; its condition is the first operand.
        if not any(coded) or handles[0].dtype.scalar == tl.int1:
            return original(self, *args)
        widened = [
            interpreter.TensorHandle(to_float32(handle), tl.float32) if is_coded else handle
            for handle, is_coded in zip(handles, coded, strict=True)
        ]
        result = original(self, *widened, *rest)
        if result.data.dtype != np.float32:
            return result
        return interpreter.TensorHandle(from_float32(result.data, tl.bfloat16), tl.bfloat16)

    return operate


def _with_fast_xor(original: Callable[..., Any]) -> Callable[..., Any]:
    """Reduce exclusive ors by NumPy; sorts need many, and the interpreter is slow at them."""

    def apply_impl(self: Any, input: Any) -> Any:
        if self.combine_fn is not tl.standard._xor_combine or self.axis is None:
            return original(self, input)
        (operand,) = input
        bits = np.bitwise_xor.reduce(operand.handle.data, self.axis, keepdims=self.keep_dims)
        return self.to_tensor(bits, operand.dtype)

    return apply_impl


def _with_scalar_index(original: Callable[..., Any]) -> Callable[..., Any]:
    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        # Triton 3.6 with NumPy 2.4: an array of shape (1,) cannot be converted to an index.
        as_index = lambda self: int(np.asarray(self.handle.data).squeeze())  # noqa: E731
        scope.set_attr(tensor, "__index__", as_index)

    return patch_lang_tensor


def _without_warnings(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Infinities and NaN are ordinary values on a GPU, which does not warn of them.
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "All-NaN slice", RuntimeWarning)
            return original(self, *args, **kwargs)

    return run


def _patch_once() -> None:
    """Let device functions reuse the language as their launch patched it.

    Whenever a device function calls another, the interpreter searches the whole language for things
    to patch, which took most of a test's time.
    """
    patch = interpreter._patch_lang
    patched: set[frozenset[int]] = set()

    def modules_of(function: Any) -> frozenset[int]:
        """Return ids of the language's modules that a function's module refers to."""
        return frozenset(id(x) for x in function.__globals__.values() if x is tl or x is tl.core)

    def launch(function: Any) -> Any:
        scope = patch(function)
        patched.clear()  # the earlier launch restored what it had patched
        patched.add(modules_of(function))
        return scope

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        modules = modules_of(self.fn)
        if modules not in patched:
            patch(self.fn)
            patched.add(modules)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter._patch_lang = launch
    interpreter.InterpretedFunction.__call__ = call


def _spare_types() -> None:
    """Cache the types of values, and skip overflow checks outside debug mode.

    The interpreter runs the compiler's front end on every block of numbers. Half of a test's time
    went into describing shapes and types again, and into repeating each integer sum in 64 bits for
    an assertion that only debug mode makes.
    """
    language, semantic = tl.core, interpreter.TritonSemantic
    block, tensor, scalar = language.block_type, language.tensor, language.dtype
    make_block, make_tensor, equal = block.__init__, tensor.__init__, scalar.__eq__
    check_overflow = semantic.binary_op_sanitize_overflow_impl
    blocks: dict[Any, dict[str, Any]] = {}
    tensors: dict[Any, dict[str, Any]] = {}
    numbers: dict[str, Any] = {}
    number_of = interpreter._get_np_dtype
    whole = frozenset([int])

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([s.value if type(s) is language.constexpr else s for s in shape])
        if not whole.issuperset(map(type, sizes)):
            make_block(self, element_ty, shape)  # which refuses 4.0, although it equals 4
            return
        key = sizes, element_ty.name
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = {k: v for k, v in vars(self).items() if k != "element_ty"}
        self.__dict__.update(blocks[key], element_ty=element_ty)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        name = type.name if type.is_block() else ""
        if name not in tensors:
            make_tensor(self, handle, type)
            own = ("handle", "type", "dtype")
            tensors[name] = {k: v for k, v in vars(self).items() if k not in own}
        self.__dict__.update(tensors[name], handle=handle, type=type, dtype=type.scalar)

    def number_type(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in numbers:
            numbers[name] = number_of(kind)
        return numbers[name]

    def check(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        if self.builder.options.debug:
            check_overflow(self, lhs, rhs, binary_op)

    block.__init__, tensor.__init__ = init_block, init_tensor
    scalar.__eq__ = lambda self, other: self is other or equal(self, other)
    semantic.binary_op_sanitize_overflow_impl = check
    interpreter._get_np_dtype = number_type
