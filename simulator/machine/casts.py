"""Casts of 16-bit tensors to fp8: where their scales come from, and the bytes that they move."""

DELAYED_SCALING, TENSOR_SCALING, ROW_SCALING = "delayed", "tensor", "row"
SCALINGS = (DELAYED_SCALING, TENSOR_SCALING, ROW_SCALING)
"""Where a cast to fp8 has its scales from: earlier steps, the largest value of the tensor, or that of each row."""
CAST_KERNELS = {DELAYED_SCALING: 1, TENSOR_SCALING: 3, ROW_SCALING: 2}
CAST_BYTES = {DELAYED_SCALING: 4, TENSOR_SCALING: 7, ROW_SCALING: 5}
"""Bytes that casts move for an element of 16 bits. With scales of earlier steps one kernel reads it and writes two
layouts (Transformer Engine's fused cast and transpose). With one of the tensor a kernel reads it to find the largest
value, a second reads it again and writes it in fp8, a third reads that and writes the other layout. With one of each
row it is read twice and written once, for one product."""
ROW_BACKWARD_BYTES = 22
"""Bytes that casts of rows take in backward, where scales are along the dim that is not contiguous, for an element of
an input or of the gradient of a result: layers of Llama compiled with torchao 0.18 on an H200
(``reports/executor/device-kernels-h200.jsonl``) take so much longer with a scale a row than with one a tensor that it
is 20 and 26 bytes; the kernels that torch.compile makes of such casts do not stream."""
