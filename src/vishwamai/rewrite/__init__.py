"""Programs rewritten before XLA compiles them: less to compile, and our operations where attention and norms are
written by hand.

`simplify` has the passes that keep every value, `program` takes them through inner programs. `graph` reads one level
with labelled axes; `softmax`, `attention`, `masks` and `norm` recognise operations in it, `attention_call` makes the
call.
"""

from vishwamai.rewrite.functions import explain_xla_compilation, optimize_xla_compilation
from vishwamai.rewrite.report import Finding, XlaReport

__all__ = ["Finding", "XlaReport", "explain_xla_compilation", "optimize_xla_compilation"]
