"""Triton's interpreter for our kernels, inside a process that may have imported triton long before.

TRITON_INTERPRET works only before the first import of triton, which Megatron-Core imports as well; so `interpret`
swaps every jitted function of ours, and those of Triton's library that they call, for its interpreted twin until
the test is over. The interpreter of Triton 3.9 keeps bf16 as bit patterns: its `dot` multiplies those as integers
(triton-lang/triton issue 11584) and its cast from fp32 cuts them off. `bf16_as_on_a_gpu` mends both: operands of a
`dot` are widened, for products of bf16 numbers are exact in fp32, and casts round to nearest even.
"""

from __future__ import annotations

import numpy as np
import triton.experimental.gluon  # noqa: F401  (looks at the library's jitted functions when it is first imported)
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction


def interpret(monkeypatch, *modules):
    """Interprets the kernels of these modules until the monkeypatch is undone."""
    # Warnings of numpy about infinities that the kernels select away.
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", _quiet(interpreter.GridExecutor.__call__))
    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", _tidy_call)
    for module in (tl, tl.core, tl.standard, tl.math, *modules):
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                monkeypatch.setattr(module, name, interpreter.InterpretedFunction(value.fn))


def bf16_as_on_a_gpu(monkeypatch):
    """Makes the interpreter multiply and round bf16 numbers as tensor cores and casts do."""
    builder = interpreter.InterpreterBuilder
    dot, cast = builder.create_dot, builder.cast_impl

    def widened(operand):
        if operand.dtype != tl.bfloat16:
            return operand
        return interpreter.TensorHandle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def rounded(self, source, dtype):
        if (source.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, dtype)
        bits = np.ascontiguousarray(source.data).view(np.uint32)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return interpreter.TensorHandle(nearest.astype(np.uint16), dtype.scalar)

    monkeypatch.setattr(builder, "create_dot", lambda self, a, b, *rest: dot(self, widened(a), widened(b), *rest))
    monkeypatch.setattr(builder, "cast_impl", rounded)


def _tidy_call(self, *arguments, **keywords):
    """A call between interpreted functions; the original never undoes its patches, and nothing compiles after it."""
    scope = interpreter._patch_lang(self.fn)
    try:
        return self.rewrite()(*arguments, **keywords)
    finally:
        scope.restore()


def _quiet(call):
    def quiet(*arguments, **keywords):
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            return call(*arguments, **keywords)

    return quiet


def truth(z, targets):
    """Log-sum-exp, log-probability of the targets and entropy of logits [T, V], in fp64."""
    log_p = z.double().log_softmax(-1)
    return z.double().logsumexp(-1), log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
