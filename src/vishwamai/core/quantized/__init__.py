"""Quantized weights beside `core.qtensor`, and the products with them.

`code_tensor` and `code_product`: formats that are data. `packed_qtensor` and `packed_product`: weights that are packed
for the CPU.
"""
