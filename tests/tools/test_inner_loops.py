"""Instructions are counted in the innermost loops of the forward pass, per multiplication and per exponential."""

from __future__ import annotations

from math import inf

from tools import inner_loops

FUNCTION = "void (anonymous namespace)::attend_block<float, ((anonymous namespace)::Statistics)0>(Call const&)"
ARM = f"""
0000000000000000 <{FUNCTION}>:
   0:	movi	v0.4s, #0x0
   4:	ldp	q4, q5, [x1], #32
   8:	fmla	v0.4s, v4.4s, v1.s[0]
   c:	bfdot	v0.4s, v4.8h, v1.2h[1]
  10:	b.ne	4 <{FUNCTION}+0x4>  // b.any
  14:	shl	v3.4s, v3.4s, #23
  18:	cbnz	x0, 14 <{FUNCTION}+0x14>
  1c:	b	0 <{FUNCTION}>
  20:	b.eq	40 <{FUNCTION}+0x40>  // b.none
0000000000000024 <another function>:
  24:	fmla	v0.4s, v4.4s, v1.s[0]
  28:	b.ne	24 <another function>  // b.any
"""
X86 = f"""
0000000000000000 <{FUNCTION}>:
   0:	vbroadcastss (%rax),%ymm4
   5:	vfmadd231ps (%rdx),%ymm4,%ymm0
   a:	vfmadd231ps 0x20(%rdx),%ymm4,%ymm1
   f:	jne    0 <{FUNCTION}>
  14:	vpslld $0x17,%ymm5,%ymm5
  19:	add    $0x20,%rax
  1d:	jb     14 <{FUNCTION}+0x14>
"""


def test_the_innermost_loops_of_the_forward_pass_are_found() -> None:
    found = list(inner_loops.loops(ARM, "attend_block<float"))
    assert [[each.name for each in loop] for loop in found] == [["ldp", "fmla", "bfdot", "b.ne"], ["shl", "cbnz"]]


def test_instructions_are_counted_per_score() -> None:
    # 4 instructions for 4 + 8 multiplications, of which a score has 128; 2 instructions for 4 exponentials.
    assert inner_loops.described(ARM).startswith("float32: products 42.7, exponential 0.50;")
    assert inner_loops.described(X86).startswith("float32: products 32.0, exponential 0.38;")


def test_an_object_without_such_loops_has_no_count() -> None:
    assert inner_loops.cheapest(list(inner_loops.loops(X86, "no such function")), lambda each: each.lanes) == inf
