"""The one reader of compiled programs' text: the forms that XLA's compilers write."""

import jax
import jax.numpy as jnp

from vishwamai.core.hlo import parse_module

TEXT = """HloModule jit_f, is_scheduled=true, input_output_alias={ {0}: (1, {}, may-alias) }

FileNames
1 "/home/me/model.py"

%fused (p.1: f32[8]) -> (f32[8], s4[3]) {
  %p.1 = f32[8]{0} parameter(0)
  ROOT %pair = (f32[8]{0:T(8,128)S(1)}, /*index=1*/s4[3]{0}) custom-call(f32[8]{0} %p.1), \
custom_call_target="say(\\"hi)", frontend_attributes={a="{x"}, metadata={op_name="jit(f)/[a/mul" stack_frame_id=3}, \
backend_config={"estimated_cycles":"70"}
}, execution_thread="core"

ENTRY %main (x: f32[8], i: s32[]) -> f32[8] {
  %x = f32[8]{0} parameter(0), metadata={op_name="x[0]"}
  %i = s32[] parameter(1)
  %limit = s32[] constant(5)
  %yes = pred[] constant(true)
  %either = f32[8]{0} conditional(%i, %x, %x), branch_computations={%fused, %other}
  ROOT %y = f32[8]{0} fusion(%either), kind=kLoop, calls=%fused, control-predecessors={%x}
}
"""


def test_every_part_of_an_instruction():
    module = parse_module(TEXT)
    assert module.entry == "main" and list(module.computations) == ["fused", "main"]
    pair, either, y = (module.by_name[name] for name in ("pair", "either", "y"))
    assert (pair.opcode, pair.operands, pair.nbytes, pair.cycles) == ("custom-call", ("p.1",), 32 + 2, 70)
    assert (pair.source, pair.frame, pair.root) == ("jit(f)/[a/mul", "3", True)
    assert "metadata" not in pair.attributes and "frontend" not in pair.attributes
    assert either.branches == ("fused", "other") and not either.root
    assert y.called("calls") == "fused" and y.called("body") is None and y.computations == (("calls", "fused"),)
    assert (module.by_name["limit"].text, module.by_name["yes"].operands) == ("5", ())


def test_names_without_a_percent_sign_are_the_same_module():
    bare = parse_module(TEXT.replace("%", ""))
    named = parse_module(TEXT)
    assert bare.entry == named.entry
    for name, one in named.by_name.items():
        found = bare.by_name[name]
        assert (found.opcode, found.nbytes, found.root) == (one.opcode, one.nbytes, one.root)
        assert found.computations == one.computations
    assert bare.by_name["either"].operands == ("i", "x", "x")
    assert parse_module("") == parse_module("no program") and parse_module("").entry == ""


def test_the_program_of_this_machine_is_read():
    def f(x):
        return jax.lax.fori_loop(0, 3, lambda _, h: jnp.sin(h) @ h, x)

    module = parse_module(jax.jit(f).lower(jnp.ones((8, 8))).compile().as_text() or "")
    (loop,) = (one for one in module.by_name.values() if one.opcode == "while")
    assert loop.called("body") in module.computations and loop.called("condition") in module.computations
    for body in module.computations.values():
        names = {one.name for one in body}
        assert sum(one.root for one in body) == 1
        assert all(set(one.operands) <= names for one in body)
    assert any("while/body" in one.source for one in module.by_name.values())


def test_attributes_of_several_lines_end_no_computation():
    """A kernel's metadata may hold line breaks, as jax's splash attention has them."""
    kernel = """  %k = f32[8]{0} custom-call(%x), custom_call_target="say", frontend_attributes={kernel_metadata={
"sizes":"{\\"block\\": 8}"
}}, metadata={op_name="jit(f)/k"}, backend_config={"estimated_cycles":"70"}
"""
    module = parse_module(TEXT.replace("  %limit", kernel + "  %limit"))
    assert list(module.by_name) == ["p.1", "pair", "x", "i", "k", "limit", "yes", "either", "y"]
    assert (module.by_name["k"].cycles, module.by_name["k"].source) == (70, "jit(f)/k")
    assert "sizes" not in module.by_name["k"].attributes
