"""Rules: how they are written (`rule`), matched (`matcher`, `engine`), applied (`rewriter`) and verified (`verify`).

The semantics of matching. Each has a negative test in `tests/patterns/test_semantics.py` or `test_rewriter.py`.

1. *Escapes.* Only values that `pattern` returns may be read outside the match.
2. *Convexity.* No path leaves the match and comes back to it.
3. *Effects.* A match spans, in program order, no mutation and no all-reduce that the rule does not contain.
4. *Literals.* A literal of the pattern is a constant, which must be equal (numbers by value, bools apart from numbers, dimensions counted
from either
   end), or a parameter, which is bound and can be checked. Nothing is a wildcard. A parameter that occurs twice is twice the same:
   one node, or two of ATen's or dsi's operators that compute the same of the same, with no effect between them.
5. *Arguments.* Arguments are compared by schema, defaults filled in, however they are spelled. One of which the pattern says nothing must
have its
   default (`alpha=2` refuses).
6. *Placement.* The replacement stands after its last input and before its first outside reader; where there is no such place the match is
refused.
7. *Rewriting.* Matching changes nothing. All changes go through `rewriter.Rewriter`: new nodes get their fake value (of the old shape and
dtype;
   changed strides are carried on, and restored by a visible copy where someone could see them), the source line of what they replace, and
   `meta["dsi_provenance"]`. No two values share memory that did not before, where anyone could tell.
8. *Sizes.* Reading a size (`sym_size`) is not reading a value: it is no escape, and is moved to another value of that size. Sizes are
compared only
   as far as they are known to be equal, so that no guard is added.

The engine matches in both orders what commutes; a rule spells alternatives with `op.either` and `op.maybe_cast`, and is told which one was
found.
"""
