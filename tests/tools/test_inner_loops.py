"""Instructions are counted in the innermost loops of the forward pass, per multiplication and per exponential."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from tools import inner_loops
from tools.native import OBJECTS

PRODUCTS = "(anonymous namespace)::BlockOfRows<float>::compute_scores(float const*) const"
WEIGHTS = "float (anonymous namespace)::update_row<((anonymous namespace)::Statistics)0, float>(Call const&)"
ARM = f"""
0000000000000000 <{PRODUCTS}>:
   0:	movi	v0.4s, #0x0
   4:	ldp	q4, q5, [x1], #32
   8:	fmla	v0.4s, v4.4s, v1.s[0]
   c:	bfdot	v0.4s, v4.8h, v1.2h[1]
  10:	b.ne	4 <{PRODUCTS}+0x4>  // b.any
0000000000000014 <{WEIGHTS}>:
  14:	shl	v3.4s, v3.4s, #23
  18:	cbnz	x0, 14 <{WEIGHTS}>
  1c:	b	0 <{PRODUCTS}>
  20:	b.eq	40 <{WEIGHTS}+0x2c>  // b.none
0000000000000024 <another function>:
  24:	fmla	v0.4s, v4.4s, v1.s[0]
  28:	b.ne	24 <another function>  // b.any
"""
X86 = f"""
0000000000000000 <{PRODUCTS}>:
   0:	vbroadcastss (%rax),%ymm4
   5:	vfmadd231ps (%rdx),%ymm4,%ymm0
   a:	vfmadd231ps 0x20(%rdx),%ymm4,%ymm1
   f:	jne    0 <{PRODUCTS}>
0000000000000014 <{WEIGHTS}>:
  14:	vpslld $0x17,%ymm5,%ymm5
  19:	add    $0x20,%rax
  1d:	jb     14 <{WEIGHTS}>
"""


def test_the_innermost_loops_of_the_forward_pass_are_found() -> None:
    for function, loop in (("BlockOfRows<float>", ["ldp", "fmla", "bfdot", "b.ne"]), ("update_row<", ["shl", "cbnz"])):
        assert [[each.name for each in found] for found in inner_loops.loops(ARM, function)] == [loop]


def test_instructions_are_counted_per_score() -> None:
    # 4 instructions for 4 + 8 multiplications, of which a score has 128; 2 instructions for 4 exponentials.
    assert inner_loops.described(ARM).startswith("float32: products 42.7, exponential 0.50;")
    assert inner_loops.described(X86).startswith("float32: products 32.0, exponential 0.38;")


def test_an_object_without_such_loops_has_no_count() -> None:
    assert inner_loops.cheapest(list(inner_loops.loops(X86, "no such function")), lambda each: each.lanes) == inf


def test_a_product_that_stores_its_sums_on_the_stack_is_found() -> None:
    spilled = X86.replace("%ymm4,%ymm1\n", "%ymm4,%ymm1\n   c:	vmovaps %ymm1,-0x40(%rbp)\n", 1)
    assert inner_loops.products_on_stack(X86) == []
    assert inner_loops.products_on_stack(spilled) == [PRODUCTS]


# Other compilers assign registers in other ways.
BUILT = [
    path
    for path in sorted(OBJECTS.glob("*.cpp.o"))
    if "emulated" not in path.name and b"GCC: (Debian 12." in path.read_bytes()
]


@pytest.mark.parametrize("path", BUILT, ids=lambda path: path.name.removesuffix(".cpp.o"))
def test_no_matrix_product_of_the_library_stores_its_sums_on_the_stack(path: Path) -> None:
    assert inner_loops.products_on_stack(inner_loops.disassembly(path)) == []
